"""Writes the recorder's graph: arguments to nodes, and the meta that every node carries.

In: Python values as the user's code passed them. Out: fx arguments, with get_attr nodes for parameters and buffers,
size nodes for symbolic sizes and held constants for foreign tensors.
"""

from __future__ import annotations

import enum
import operator
from collections import Counter
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import fx

from ...graph.edit import describe, set_base, set_writes
from ...graph.opgraph import value_tensors
from ...graph.sizes.nodes import SizeNodes
from ...ir.errors import CaptureError
from ...ir.plain_graph import PlainGraph
from ...runtime.torch_names import (
    DisableTorchFunction,
    FakeTensorMode,
    is_functorch_wrapped_tensor,
    set_grad_enabled,
    unset_fake_temporarily,
)
from ..packing.varying_inputs import Unread
from .guard import Borrowed
from .lines import SourceLines
from .rows.sizes import RowTape, Tracked
from .values.chosen_count import ChosenCount
from .values.known import KnownValues
from .watch.constructors import TensorType

ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu")
_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # as torch reads them
_PLAIN = {int, float, bool, str, type(None), complex, torch.dtype, torch.memory_format, torch.layout, EllipsisType}


class GraphWriter:
    """An fx graph under construction, and which node holds which tensor."""

    def __init__(self, held: Borrowed, fake_mode: FakeTensorMode):
        self.held = held
        self.fake_mode = fake_mode
        self.graph = PlainGraph()
        self.node_of: dict[int, fx.Node] = {}  # id(tensor) -> the node that last produced it
        self.alive: list[Any] = []  # keeps those ids from being reused
        self.attributes: dict[tuple[str, str], fx.Node] = {}  # (name, module path) -> get_attr node
        self.constants: dict[str, torch.Tensor] = {}
        self.constant_of: dict[int, tuple[torch.Tensor, fx.Node]] = {}  # id(real tensor) -> its fake and get_attr node
        self.values = KnownValues()
        self.storages: dict[int, fx.Node] = {}  # storage -> first node that holds it
        self.items: dict[fx.Node, list[tuple[torch.Tensor, fx.Node]]] = {}  # multi-output node -> its getitem nodes
        self.modules: list[tuple[str, str, int]] = [("", type(held.model).__name__, 0)]  # path, type, number of call
        self.autocasts: list[tuple[fx.Node | None, tuple | None]] = [(None, None)]
        self.lines = SourceLines()
        self.sizes = SizeNodes(self.add_plain)
        self.rows: RowTape | None = None  # where what forward asks of sizes is followed
        self.busy = False  # inside a leaf or a recorded function: what runs there is not ours to record
        self.rebuild_args = False  # the arguments being lowered hold something that must not run as it is
        self.touched: list[tuple[fx.Node, torch.Tensor, int]] = []  # tensor arguments and their version before the call

    def annotate(self, node: fx.Node, value: Any) -> None:
        """Fill the meta that every node has."""
        path, kind, number = self.modules[-1]
        meta = {
            "module_path": path,
            "module_type": kind,
            "module_call": number,
            "source": self.lines.current() if node.op != "placeholder" else "",
            "no_grad": not torch.is_grad_enabled(),
            "autocast": self.autocasts[-1][1],
        }
        describe(node, meta, value)
        self.alive.append(value)

    def bind(self, node: fx.Node, result: Any) -> None:
        """Let later uses of the result's tensors refer to the node, through getitem nodes if it has several."""
        if isinstance(result, torch.Tensor):
            self.node_of[id(result)] = node
            return
        if not isinstance(result, (tuple, list, dict)):
            return
        for key, item in result.items() if isinstance(result, dict) else enumerate(result):
            if has_tensor(item):
                child = self.add_plain("call_function", operator.getitem, (node, key), item)
                set_base(child, node)
                if self.rows is not None and node in self.rows.follows:
                    self.rows.follows.add(child)
                self.items.setdefault(node, []).append((item, child))
                if isinstance(item, torch.Tensor):
                    self.storages.setdefault(storage_of(item), child)
                self.bind(child, item)

    def lower(self, value: Any) -> Any:
        """A Python argument as an fx argument: tensors and symbolic sizes become nodes."""
        kind = type(value)
        if kind in _PLAIN:
            if kind is str and value.startswith(ACCELERATORS) and torch.device(value).type in ACCELERATORS:
                self.rebuild_args = True
                return "cpu"
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor_node(value)
        if isinstance(value, Tracked):
            self.rebuild_args = True
            return value.slot()
        if isinstance(value, ChosenCount):
            self.rebuild_args = True
            return value.value
        if isinstance(value, (tuple, list)):
            items = [self.lower(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self.lower(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.lower(value.start), self.lower(value.stop), self.lower(value.step))
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._size_node(value)
        if isinstance(value, TensorType):
            self.rebuild_args = True
            return value.dtype
        if isinstance(value, type) and value in _TYPES:
            return _TYPES[value]
        if isinstance(value, torch.device):
            self.rebuild_args |= value.type in ACCELERATORS
            return torch.device("cpu") if value.type in ACCELERATORS else value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, enum.Enum):
            return value.value if isinstance(value, (int, float, str)) else value
        if isinstance(value, range):
            return list(value)
        if isinstance(value, Unread):
            value.refuse()
        if isinstance(value, torch.Generator):
            raise CaptureError(
                f"{self.lines.where()}\n  draws from a torch.Generator of its own, whose state no program has: leave "
                "it out, and the numbers follow from the seed of compile"
            )
        raise CaptureError(
            f"{self.lines.where()}\n  passes a {kind.__module__}.{kind.__name__} to a torch function; a program can "
            "hold tensors, numbers, strings, dtypes, devices, slices and nests of them"
        )

    def _size_node(self, value: torch.SymInt | torch.SymFloat) -> Any:
        try:
            return self.sizes.node(value.node.expr)
        except NotImplementedError as error:
            raise CaptureError(f"{self.lines.where()}\n  {error}") from error

    def tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        """The node that holds a tensor; parameters, buffers and foreign tensors get a get_attr node."""
        node = self.node_of.get(id(tensor))
        fake = tensor
        if node is None and id(tensor) in self.held.names:
            node = self._attribute(tensor)
        elif node is None:
            fake, node = self._constant(tensor)
        self.touched.append((node, fake, fake._version))
        return node

    def _attribute(self, fake: torch.Tensor) -> fx.Node:
        path = self.modules[-1][0]
        names = self.held.names[id(fake)]
        name = next((n for n in names if path and n.startswith(f"{path}.")), names[0])
        if name in self.held.packed and path != name.rpartition(".")[0]:
            raise CaptureError(
                f"{self.lines.where()}\n  reads {name}, a quantised weight of which a program has the packed bytes. "
                "Adapters that call the layer and leave its weight alone, such as LoRA without use_dora, are trained "
                "on such a base; for the others, load the base without quantisation"
            )
        if (name, path) not in self.attributes:
            self.attributes[name, path] = self._add_attribute(name, fake)
        return self.attributes[name, path]

    def _constant(self, tensor: torch.Tensor) -> tuple[torch.Tensor, fx.Node]:
        """A tensor that is no input, parameter or buffer: kept with the graph under a name of its own."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or is_functorch_wrapped_tensor(tensor):
            raise CaptureError(f"{self.lines.where()}\n  uses a tensor that was made where the recorder cannot see")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"{self.lines.where()}\n  uses a trainable tensor, {self.held.constant_names.take(tensor)!r}, of "
                f"shape {list(tensor.shape)} that is not registered in the model, so that nothing would train it: "
                "assign it as an nn.Parameter attribute of a module, or detach() it; a teacher's weights are constants "
                "under torch.no_grad(), or after teacher.requires_grad_(False)"
            )
        if id(tensor) not in self.constant_of:
            name = self.held.constant_names.take(tensor)
            self.busy = True
            with DisableTorchFunction(), self.fake_mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            self.busy = False
            self.constants[name] = tensor
            with unset_fake_temporarily(), DisableTorchFunction():
                self.values.know(fake, tensor.detach().clone())
            self.constant_of[id(tensor)] = fake, self._add_attribute(name, fake)
            self.alive += [tensor, fake]
        self.rebuild_args = True
        return self.constant_of[id(tensor)]

    def _add_attribute(self, name: str, fake: torch.Tensor) -> fx.Node:
        node = self.add_plain("get_attr", name, (), fake)
        set_base(node, self.storages.get(storage_of(fake)))
        self.storages.setdefault(storage_of(fake), node)
        return node

    def add_plain(self, op: str, target: Any, args: tuple, value: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args)
        self.annotate(node, value)
        return node

    def learn_sizes(self, fake: torch.Tensor) -> None:
        """Make size nodes for an input's symbolic dims."""
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.sizes.learn(size.node.expr, self.node_of[id(fake)], dim, size)

    def write_back(self, name: str, buffer: torch.Tensor, new: torch.Tensor) -> None:
        """Copy a value into a buffer at the end of the step."""
        owner, source = self._attribute(buffer), self.tensor_node(new)
        self.add_plain("call_function", set_grad_enabled, (False,), None)
        node = self.add_plain("call_method", "copy_", (owner, source), buffer)
        node.meta.update(no_grad=True, updates_buffers=(name,))
        set_writes(node, (owner,))
        set_base(node, owner)
        self.add_plain("call_function", set_grad_enabled, (True,), None)

    def placeholder(self, name: str, fake: torch.Tensor) -> None:
        """Add an input of the program."""
        node = self.add_plain("placeholder", name, (), fake)
        self.storages.setdefault(storage_of(fake), node)
        self.bind(node, fake)
        if self.rows is not None:
            self.rows.follows.add(node)


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def number_draws(graph: fx.Graph) -> None:
    """Number the random nodes of each place of the model; call it before any of them is removed."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.meta.get("random"):
            place = node.meta["module_path"]
            node.meta["draw"] = counts[place]
            counts[place] += 1


def has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(True for _ in value_tensors(value))
