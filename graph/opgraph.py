"""The op graph: a captured training step at the level of torch functions and leaf `nn.Module`s.

In: nothing but torch. Out: the `OpGraph` type that every pass before programs reads and rewrites. Capture lives in
`penstock.compiler.capture.trace`; this file documents what capture promises.

Node meta (every node but the output node has each of the first ten):

| key | meaning |
|---|---|
| `val` | the value on fake tensors: a `FakeTensor` on cpu, a nest of them, or a plain Python value |
| `module_path` | dotted path of the innermost module call that the op ran in ("" is the root; a leaf: its own) |
| `module_type` | class name of that module |
| `module_call` | number of that call; it tells two calls of one shared module apart |
| `source` | "file.py:123: code" of the user's innermost line, "" for placeholders |
| `no_grad` | recorded while gradients were disabled |
| `autocast` | None, or `(device_type, dtype, enabled, cache_enabled)` of the innermost `torch.autocast` in the model |
| `mutates` | the argument nodes whose storage the op writes in place |
| `alias_of` | a node whose storage the value shares (a view's base, a tied parameter's first name), else None |
| `random` | draws from the random generator in training mode |
| `draw` | with `random`: its number among the draws of its `module_path`, from 0, in recorded order |
| `updates_buffers` | names of the model's buffers that it writes: BatchNorm statistics, in-place counters (if any) |
| `dims` | the shape of a tensor, with names (`sizes.NamedSize`); empty or missing where no size has one |
| `eval_args`, `eval_kwargs` | the arguments in evaluation mode, present only where they differ |

Gradient and autocast switches stay in the graph as nodes, so that running `OpGraph.module` is exactly the user's
step; a pass that moves nodes drops them (`is_mode_switch`) and prints blocks from `no_grad` and `autocast` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ..ir.plain_graph import PlainGraph
from ..ir.program import HookCall, ParamSpec, RowPart, SizeRange, TeamPart
from ..runtime.torch_names import CHECKS, LazyGraphModule, enter_autocast, exit_autocast, set_grad_enabled
from .loss_terms import LossRules

Looked = TypeVar("Looked")
MODE_SWITCHES = (set_grad_enabled, enter_autocast, exit_autocast)


def is_check(node: fx.Node) -> bool:
    """True for a check of tensors' values that the model makes: it gives nothing, and stays in the programs."""
    return node.op == "call_function" and node.target in CHECKS


def is_mode_switch(node: fx.Node) -> bool:
    """True for a node that only turns gradients or autocast on or off for the nodes after it."""
    return node.op == "call_function" and node.target in MODE_SWITCHES


@dataclass(frozen=True)
class ParamChange:
    """The changes that forward makes to a parameter in place: element-wise `calls`; none stands for an embedding's
    `max_norm`, which changes the rows that it looks up."""

    source: str
    calls: tuple[HookCall, ...] = ()


@dataclass(frozen=True)
class PartParam:
    """A part of a parameter of the model, as a parameter of its own: rows of it, which share its memory, or what each
    member of a team has of it, of which only the shape and type count."""

    part: RowPart | TeamPart
    tensor: nn.Parameter


@dataclass
class OpGraph:
    """A training step: `module(**batch)` returns `{"loss": ..., other outputs by name}`.

    `module`'s submodules, parameters and buffers are the user's own objects under the user's own dotted names, real or
    on the meta device, in whatever training mode the user left them; `parts` are in place of parameters of the model.
    """

    module: fx.GraphModule
    inputs: dict[str, torch.Tensor]  # placeholder name -> fake tensor, in the order of the placeholders
    outputs: dict[str, fx.Node]  # "loss" first; the output node's args[0] is this dict
    model: nn.Module  # the user's model
    eval_error: str | None = None  # why evaluation mode cannot reuse this graph; None if it can
    missing_buffers: tuple[str, ...] = ()  # non-persistent buffers on meta: neither here nor in any checkpoint
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # get_attr target -> unregistered tensor used
    param_dtype: torch.dtype | None = None  # floating parameters were traced in this dtype instead of their own
    sum_dtype: torch.dtype | None = None  # their gradients are added up in this dtype over micro-batches
    boundary_dtype: torch.dtype | None = None  # activations that autocast leaves in fp32 have it between stages
    autocast: torch.dtype | None = None  # the step runs under `torch.autocast` to this dtype
    changes: dict[str, ParamChange] = field(default_factory=dict)  # parameter -> what forward does to it in place
    hooks: dict[str, tuple[HookCall, ...]] = field(default_factory=dict)  # parameter -> what its gradient hooks do
    notes: tuple[str, ...] = ()  # where the graph differs from the model on purpose, for people
    places: frozenset[str] = frozenset()  # inputs whose numbers are places in values of a micro-batch
    unread: frozenset[str] = frozenset()  # texts and numbers of the batch that neither forward nor the loss reads
    pointwise_again: bool = False  # whether backward computes pointwise results again instead of finding them saved
    symbols: dict[str, Any] = field(default_factory=dict)  # sizes that are not fixed, by name -> SymInt
    sizes: dict[str, SizeRange] = field(default_factory=dict)  # named sizes, of which `dims` are made
    loss: LossRules = field(default_factory=LossRules)  # its terms, and what is counted over the whole batch
    packed: int = 0  # the most documents that a row of the example batch holds; 0 where its rows are not packed
    repeated_buffers: tuple[str, ...] = ()  # buffers that are alike before each micro-batch of a step
    parts: dict[str, PartParam] = field(default_factory=dict)  # get_attr target -> rows of a parameter
    team: int = 1  # the members of a team among which the work inside layers is divided
    apart: bool = False  # whether these have different tokens
    at_inputs: Callable[[Any], OpGraph] | None = None  # of a trace for any rows: the graph of another batch
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what was made of it
    answers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # about calls that are alike
    looked: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what was found in its modules

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in execution order."""
        return list(self.module.graph.nodes)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of the user's model by dotted name, or its parts; a tied parameter appears under each of its
        names."""
        found = dict(self.model.named_parameters(remove_duplicate=False))
        whole = {id(found[row.part.parameter]) for row in self.parts.values()}
        left = {name: param for name, param in found.items() if id(param) not in whole}
        return left | {name: row.tensor for name, row in self.parts.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer of the user's model by dotted name, all aliases."""
        return dict(self.model.named_buffers(remove_duplicate=False))

    def ties(self) -> dict[str, str]:
        """Alias name -> first name, for parameters and buffers that are one object under several names."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, tensor in [*self.parameters().items(), *self.buffers().items()]:
            canonical = first.setdefault(id(tensor), name)
            if canonical != name:
                found[name] = canonical
        return found

    @property
    def divided(self) -> bool:
        """Whether members of a team have parts of parameters, each its own."""
        return any(isinstance(row.part, TeamPart) for row in self.parts.values())

    @property
    def part_names(self) -> dict[str, str]:
        """The parameter of each part, by the part's name."""
        return {name: row.part.parameter for name, row in self.parts.items()}

    @property
    def unregistered_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of get_attr nodes that the model does not register under that name."""
        return {**self.constants, **{name: row.tensor for name, row in self.parts.items()}}

    def node_parameters(self, node: fx.Node) -> dict[str, nn.Parameter]:
        """Parameters that this one node reads, by dotted name: a leaf module's own, or the one a get_attr names."""
        if node.op not in ("call_module", "get_attr"):
            return {}
        key = (self.module, node.op, node.target)
        if key not in self.looked:  # every partition asks again
            self.looked[key] = self._held_parameters(node.op, str(node.target))
        found: dict[str, nn.Parameter] = self.looked[key]
        return found

    def _held_parameters(self, op: str, target: str) -> dict[str, nn.Parameter]:
        if op == "call_module":
            leaf = self.module.get_submodule(target)
            return {f"{target}.{name}": p for name, p in leaf.named_parameters(remove_duplicate=False)}
        owner, _, name = target.rpartition(".")
        value = getattr(self.module.get_submodule(owner), name)
        return {target: value} if isinstance(value, nn.Parameter) else {}

    def compute_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype in which the step computes with a parameter."""
        if self.param_dtype is not None and parameter.is_floating_point():
            return self.param_dtype
        return parameter.dtype

    def gradient_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype in which a parameter's gradients are added up."""
        dtype = self.compute_dtype(parameter)
        return self.sum_dtype if self.sum_dtype is not None and dtype == self.param_dtype else dtype

    def param_spec(self, name: str, parameter: torch.Tensor) -> ParamSpec:
        """A parameter as programs know it, without hooks and owners."""
        kinds = (self.compute_dtype(parameter), self.gradient_dtype(parameter))
        kind, sums = (str(dtype).removeprefix("torch.") for dtype in kinds)
        part = self.parts[name].part if name in self.parts else None
        return ParamSpec(name, tuple(parameter.shape), kind, parameter.requires_grad, part=part, sum_dtype=sums)

    def once(self, find: Callable[[OpGraph], Looked]) -> Looked:
        """The result of `find` on the graph, which is looked for once: of a graph that nothing edits any more."""
        key = (find, self.module)
        if key not in self.looked:
            self.looked[key] = find(self)
        found: Looked = self.looked[key]
        return found

    def rebuild(self) -> None:
        """Make `module` anew after its graph was edited."""
        self.module = build_module(self.model, self.graph, self.unregistered_tensors)

    def evaluation(self) -> fx.GraphModule:
        """The same graph with the evaluation-mode arguments put in; call `.eval()` on the user's model to run it.

        Raises ValueError when `eval_error` is set.
        """
        if self.eval_error is not None:
            raise ValueError(f"evaluation needs its own trace: {self.eval_error}")
        graph = PlainGraph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            arguments = (node.meta.get("eval_args", node.args), node.meta.get("eval_kwargs", node.kwargs))
            args, kwargs = fx.map_arg(arguments, copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        return build_module(self.model, graph, self.unregistered_tensors)


def build_module(model: nn.Module, graph: fx.Graph, unregistered: dict[str, torch.Tensor]) -> fx.GraphModule:
    """A GraphModule over `graph` that holds the user's own leaf modules, parameters and buffers under their names, and
    what is `unregistered`.

    Torch's constructor would register get_attr buffers anew inside the user's modules, losing their persistence. Its
    Python is made when it is first asked for: most graphs are never run.
    """
    built = LazyGraphModule(nn.Module(), fx.Graph(), type(model).__name__)
    leaves = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    tensors = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    places: dict[str, tuple[Any, nn.Module]] = {"": (model, built)}  # path -> the user's module and the one made here

    def place(path: str) -> tuple[Any, nn.Module]:
        if path not in places:
            above, _, last = path.rpartition(".")
            source, owner = place(above)
            if last not in owner._modules:
                owner.add_module(last, nn.Module())
            places[path] = getattr(source, last, None), owner.get_submodule(last)
        return places[path]

    for name in dict.fromkeys([*leaves, *tensors]):
        above, _, last = name.rpartition(".")
        source, owner = place(above)
        if owner is source and name not in unregistered:
            continue  # inside a leaf that is there already
        value = unregistered[name] if name in unregistered else getattr(source, last)
        if isinstance(value, (nn.Module, nn.Parameter)):
            setattr(owner, last, value)
        else:
            kept = name not in unregistered and last not in source._non_persistent_buffers_set
            owner.register_buffer(last, value, persistent=kept)
    built.graph = graph
    return built


def missing_buffers(model: nn.Module) -> tuple[str, ...]:
    """Non-persistent buffers on the meta device: their values are neither here nor in a checkpoint."""
    on_meta = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    return tuple(sorted(on_meta - model.state_dict(keep_vars=True).keys()))


def value_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's `val`: itself, or those nested in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from value_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from value_tensors(item)
