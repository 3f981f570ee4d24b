"""What a training step is made of: stages, values, and one program per device.

A `Program` is a `torch.fx.Graph` whose nodes call the ops of `ops.py`. Edges are the only synchronisation: an op starts
when its inputs are ready and its stream is free; the order in the text is the issue order per stream, and the order in
which memory is taken and given back. A stage is known here only by its interface (`StageSpec`); its code is a module of
the generated file.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from . import ops
from .errors import VerifyError
from .ops import Op

PAGE = 4096  # what lies in DRAM or on SSD begins at a multiple, so that disks read and write it in place
STATE_ROOM = 256  # bytes a parameter, to align its master and its states


@dataclass(frozen=True)
class TensorSpec:
    """One tensor at the border of a stage. `batched`: dimension 0 is the micro-batch (else it is sent whole)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "float32"
    requires_grad: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter or buffer of a stage, under the user's own dotted name.

    `dtype` is that of the computation; `owner` is False where another stage counts and saves this tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    owner: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class SavedSpec:
    """A class of saved tensors: the output of one costly call in a stage's forward, for one micro-batch.

    Where it is kept, rematerialisation saves its `flops`. `calls`: which of the stage's costly calls it is, counted
    from 0 in the order in which they run. `is_saved`: autograd saves it too, it is part of the stage's `kept_bytes`.
    """

    name: str
    bytes: int
    flops: float
    calls: tuple[int, ...]
    is_saved: bool = False


@dataclass(frozen=True)
class StageSpec:
    """The interface and the measured or inferred costs of one stage, for one micro-batch.

    `outputs` are the values that later stages, or the step's result, need; `extra_outputs` exist in evaluation only.
    `kept_bytes` is what backward needs beyond inputs and parameters; workspaces are what an op takes while it runs and
    gives back. `traffic` is bytes read and written in the device's own memory, for the roofline.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]
    buffers: tuple[ParamSpec, ...] = ()
    extra_outputs: tuple[TensorSpec, ...] = ()
    loss: str | None = None  # the name of the output that is the loss
    kept_bytes: int = 0
    forward_workspace_bytes: int = 0
    light_workspace_bytes: int = 0  # of a forward that keeps nothing
    backward_workspace_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_traffic_bytes: float = 0.0
    backward_traffic_bytes: float = 0.0
    rematerialisable: bool = True  # False where a second forward would not repeat the first exactly
    title: str = ""  # what it holds, for people: "transformer.h.3 to h.5"
    launches: int = 0  # torch calls in one forward, for the launch overhead of the cost model
    seconds: tuple[tuple[str, float, float, float], ...] = ()  # measured: device, forward, rematerialisation, backward
    saved: tuple[SavedSpec, ...] = ()  # what could be kept, so that less is computed again
    taking: tuple[tuple[str, float], ...] = ()  # measured: device, rematerialisation that takes all of `saved`
    weight_share: float = 0.5  # of backward's work, what only the gradients of parameters need
    split_bytes: int = 0  # gradients that wait for that part where backward is split

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in the dtype of the computation, each aligned as in its buffer."""
        return self.part_bytes(len(self.params))

    def part_bytes(self, num_params: int) -> int:
        """Bytes of the first so many parameters."""
        return self._ends_bytes[num_params]

    @cached_property
    def _ends_bytes(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer, and at last its end; planning asks for it often."""
        return tuple(accumulate((aligned(p.bytes) for p in self.params), initial=0))

    @property
    def grad_bytes(self) -> int:
        return sum(p.bytes for p in self.params if p.requires_grad)

    @property
    def trained_params(self) -> int:
        return sum(p.numel for p in self.params if p.requires_grad)

    def again_s(self, device: str, whole_s: float, spared_flops: float) -> float:
        """Seconds of a rematerialisation that takes `whole_s` but for classes of saved tensors of so many FLOPs. Where
        a device was not measured with all classes, seconds are split by arithmetic."""
        if device not in dict(self.taking):
            return whole_s * (1.0 - spared_flops / self.forward_flops if self.forward_flops else 1.0)
        every_flops = sum(saved.flops for saved in self.saved)
        share = spared_flops / every_flops if every_flops else 0.0
        return whole_s - share * max(0.0, whole_s - dict(self.taking)[device])

    def shard(self, count: int) -> StageSpec:
        """The stage as one of `count` members of a group keeps it: of every parameter, read as one row, a piece. All
        pieces are equally long; zeros fill the last."""
        if count not in self._shards:
            pieces = (replace(p, shape=(-(-p.numel // count),)) for p in self.params)
            self._shards[count] = replace(self, params=tuple(pieces))
        return self._shards[count]

    @cached_property
    def _shards(self) -> dict[int, StageSpec]:
        return {}

    def output(self, name: str) -> TensorSpec:
        return next(o for o in (*self.outputs, *self.extra_outputs) if o.name == name)


@dataclass(frozen=True)
class Interface:
    """What all programs of one plan share and their texts refer to by name.

    `groups`: name to its members, each (device, stage, parameter name), reduced together. A member without a name
    takes part with the whole value, one without a stage with any stage; "world" is every device.
    `lanes`: where several copies of the computation share the micro-batches, the machine's devices of each, in the
    order of the programs; `num_devices` and `micro_batches` are then those of one, and devices that `SHARDS` or
    `REPLICAS` joins are in other lanes, so that these groups have no rows. `shards`: so many lanes, one behind the
    other, share each stage's weights. See `fleet.py`.
    `state_bytes_per_param`: optimizer states of one trained parameter; `states`: of each stage, where that depends on
    the shapes of its parameters; `master`: fp32 copies exist beside the weights.
    `asynchronous`: every micro-batch is a mini-batch, with one update of each stage.
    """

    stages: dict[str, StageSpec]
    batch: dict[str, TensorSpec]  # of one micro-batch
    num_devices: int = 1
    micro_batches: int = 1
    groups: dict[str, tuple[tuple[int, str, str], ...]] = field(default_factory=dict)
    state_bytes_per_param: float = 8.0
    master: bool = False
    states: dict[str, int] = field(default_factory=dict)
    lanes: tuple[tuple[int, ...], ...] = ()
    shards: int = 1
    asynchronous: bool = False

    @property
    def replicas(self) -> int:
        return len(self.lanes) // self.shards if self.lanes else 1

    @property
    def total_micro_batches(self) -> int:
        """Of all lanes together."""
        return self.micro_batches * max(1, len(self.lanes))

    @property
    def world_size(self) -> int:
        """Devices of the machine that take part."""
        return self.num_devices * max(1, len(self.lanes))

    def size(self, group: str) -> int:
        """How many devices a group has."""
        if self.lanes and group in ops.MESH_GROUPS:
            return self.shards if group == ops.SHARDS else self.replicas
        return len(self.members(group))

    def state_bytes(self, spec: StageSpec) -> int:
        """Optimizer states of a stage."""
        return self.states.get(spec.name, int(self.state_bytes_per_param * spec.trained_params))

    def states_bytes(self, spec: StageSpec) -> int:
        """A buffer of a stage's fp32 masters, if there are any, and its optimizer states, with room to align each."""
        trained = [p for p in spec.params if p.requires_grad]
        masters = 4 * spec.trained_params if self.master else 0
        return aligned(masters + self.state_bytes(spec) + STATE_ROOM * len(trained), PAGE) if trained else 0

    def all_bytes(self, spec: StageSpec) -> int:
        """A buffer of a stage's weights, and behind them its masters and states."""
        return aligned(spec.weight_bytes, PAGE) + self.states_bytes(spec)

    def masters_say_all(self, spec: StageSpec) -> bool:
        """Whether weights follow from masters. A frozen parameter has none, so that its weight is to be read, too."""
        return self.master and all(param.requires_grad for param in spec.params)

    def members(self, group: str) -> list[int]:
        """The devices of a group, each once, in its order."""
        return list(dict.fromkeys(device for device, _, _ in self.groups[group]))

    def part_of(self, stage: str, group: str) -> StageSpec:
        """The stage as a member of the group keeps it: whole where there is no group, else a shard."""
        spec = self.stages[stage]
        return spec.shard(self.size(group)) if group else spec

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Interface:
        raw = json.loads(text)

        def tensors(rows: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows)

        def params(rows: list[dict[str, Any]]) -> tuple[ParamSpec, ...]:
            return tuple(ParamSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows)

        for stage in raw["stages"].values():
            for key in ("inputs", "outputs", "extra_outputs"):
                stage[key] = tensors(stage[key])
            for key in ("params", "buffers"):
                stage[key] = params(stage[key])
            for key in ("seconds", "taking"):
                stage[key] = tuple((name, *parts) for name, *parts in stage[key])
            stage["saved"] = tuple(SavedSpec(**{**row, "calls": tuple(row["calls"])}) for row in stage["saved"])
        raw["stages"] = {name: StageSpec(**stage) for name, stage in raw["stages"].items()}
        raw["batch"] = {name: tensors([row])[0] for name, row in raw["batch"].items()}
        raw["lanes"] = tuple(tuple(lane) for lane in raw["lanes"])
        raw["groups"] = {name: tuple((d, s, p) for d, s, p in rows) for name, rows in raw["groups"].items()}
        return Interface(**raw)


class Program:
    """One device's step: a graph over the ops, with the interface that its names refer to.

    `function` is "step" (training) or "evaluate". The graph has one placeholder, `batch`, and one output: a dict of
    name to a list of values, for instance {"loss": [loss_m0, loss_m1]}.
    """

    def __init__(self, device: int, interface: Interface, graph: fx.Graph | None = None, function: str = "step"):
        self.device = device
        self.interface = interface
        self.function = function
        self.graph = fx.Graph() if graph is None else graph
        if graph is None:
            self.graph.placeholder("batch")

    @property
    def batch(self) -> fx.Node:
        return next(iter(self.graph.nodes))

    def ops(self) -> Iterator[fx.Node]:
        """The nodes that call an op, in issue order."""
        return (n for n in self.graph.nodes if n.op == "call_function" and isinstance(n.target, ops.Op))

    def emit(self, op: Op, *args: Any, names: Sequence[str] = (), **fields: Any) -> list[fx.Node]:
        """Append an op; return one node per value that it produces, named after `names` (made unique)."""
        node = self.graph.call_function(op, args, fields)
        return self.bind_results(node, names)

    def bind_results(self, node: fx.Node, names: Sequence[str] = ()) -> list[fx.Node]:
        """Infer the node's types and give each of its results a node of its own, right behind it."""
        result = infer(self, node)
        if result is None:
            return []
        if isinstance(result, ops.Value):
            if names:
                _rename(node, names[0])
            return [node]
        values, after = [], node
        for i, value in enumerate(result):
            with self.graph.inserting_after(after):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta["type"] = value
            if i < len(names):
                _rename(item, names[i])
            values.append(item)
            after = item
        return values

    def returns(self, results: dict[str, list[fx.Node]]) -> None:
        """Set what the step hands back (replacing what it did)."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.graph.output(results)

    def results(self) -> dict[str, list[fx.Node]]:
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                return {name: list(nodes) for name, nodes in node.args[0].items()}
        return {}

    def copy(self) -> Program:
        """A program of its own, which a pass may rewrite; types are inferred anew."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        if output is not None:
            graph.output(output)
        for old, new in mapping.items():
            if new.name != old.name:
                _rename(new, old.name)
        return Program(self.device, self.interface, graph, self.function)

    def with_interface(self, **changes: Any) -> Program:
        self.interface = replace(self.interface, **changes)
        return self


def infer(program: Program, node: fx.Node) -> Any:
    """Run the op's inference on the types of its operands and store it as `node.meta["type"]`.

    Raises `VerifyError` where the operands are not what the op takes.
    """
    context = ops.Context(program.interface, program.device)
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("type"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("type"))
    assert isinstance(node.target, ops.Op)
    try:
        result = node.target.infer(context, *args, **kwargs)
    except (TypeError, KeyError, StopIteration, AttributeError, ValueError) as error:
        reason = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
        raise VerifyError(
            f"`{node.target.name}` does not take these operands: {reason}", device=program.device
        ) from error
    node.meta["type"] = result
    return result


def infer_all(program: Program) -> None:
    """Re-run inference over the whole program, as the verifier does: stale types are replaced, bad operands raise."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, ops.Op):
            infer(program, node)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            types = source.meta["type"]
            if not isinstance(types, tuple) or not 0 <= index < len(types):
                raise VerifyError(f"`{source.target.name}` has no result {index}", device=program.device)
            node.meta["type"] = types[index]


def work_of(program: Program, node: fx.Node) -> ops.Work:
    """What the op occupies and for how much, from the types of its operands."""
    context = ops.Context(program.interface, program.device)
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("type"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("type"))
    return node.target.work(context, *args, **kwargs)  # type: ignore[union-attr]


def values_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the values an op produces: itself, or its unpacked results, in order."""
    types = node.meta.get("type")
    if types is None:
        return []
    if isinstance(types, ops.Value):
        return [node]
    items = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    return sorted(items, key=lambda item: int(item.args[1]))  # type: ignore[arg-type]


def donated(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the op takes over: they are dead behind it and need no `free`."""
    op = node.target
    assert isinstance(op, ops.Op)
    if not op.donates:
        return []
    bound = op.bind(node.args, node.kwargs)
    found: list[fx.Node] = []
    for name in op.donates:
        fx.node.map_arg(bound.get(name), found.append)
    return found


def operands(node: fx.Node) -> list[fx.Node]:
    """The values an op reads, in order, without the batch."""
    return [n for n in node.all_input_nodes if n.op != "placeholder"]


def place_frees(program: Program) -> None:
    """Put one `free` behind the last use of every value that the program owns; removes all older frees first.

    Values freed at the same place share one op. Results, donated values and resident weights are not freed.
    """
    graph = program.graph
    for node in list(program.ops()):
        if node.target is ops.free:
            graph.erase_node(node)
    position = {node: i for i, node in enumerate(graph.nodes)}
    returned = {n for nodes in program.results().values() for n in nodes}
    given_away = {n for node in program.ops() for n in donated(node)}
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in list(program.ops()):
        for value in values_of(node):
            if value in returned or value in given_away or not value.meta["type"].owned:
                continue
            users = [user for user in value.users if user.op == "call_function"]
            end = max([*users, node], key=lambda n: position[n])
            if end is node:  # never used: free behind the unpacking
                end = max(values_of(node), key=lambda n: position[n])
            last.setdefault(end, []).append(value)
    for end, values in last.items():
        place = max([end, *values_of(end)] if isinstance(end.target, ops.Op) else [end], key=lambda n: position[n])
        with graph.inserting_after(place):
            graph.call_function(ops.free, tuple(values))


def dtype_bytes(name: str) -> int:
    return getattr(torch, name).itemsize


def aligned(num_bytes: int, alignment: int = 512) -> int:
    """Rounded up so that every tensor of a flat buffer starts where copies and vector loads like it."""
    return -(-num_bytes // alignment) * alignment


def _rename(node: fx.Node, name: str) -> None:
    if node.name != name:
        node._rename(name)
