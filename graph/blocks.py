"""Basic blocks: runs of consecutive op-graph nodes that are planned, measured and printed as one.

A block holds nodes in recorded order. Nodes that depend on nothing but the batch and constants (masks, position ids,
rotary tables) belong to no block: every stage that uses them computes them anew instead of receiving them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from ..ir.machine.call_mix import NO_CALLS, CallMix
from ..ir.regions import mark_of
from ..runtime.functions import part_statistics
from .opgraph import OpGraph, value_tensors
from .sizes.named import expressions_of
from .turn_seconds import TurnSeconds

BEGIN = 4  # the position of `begin` among the arguments of `part_statistics`


@dataclass(frozen=True)
class CostlyCall:
    """One costly call in a block's forward, as a class of saved tensors; see `saved_classes`."""

    node: int  # index of the block's node that makes the call
    bytes: int  # bytes of the call's output
    flops: float
    is_saved: bool  # its output is part of the block's `kept_bytes`
    can_be_kept: bool  # the output is not changed in place, and a forward without gradients makes the same call


@dataclass(frozen=True)
class AgainCost:
    """The cost of running forward again without what only the first one needs (`first_only`), or without results of
    parts in tiles, which backward computes itself."""

    flops: float
    traffic_bytes: float
    mix: CallMix
    launches: int
    peak_bytes: int


@dataclass(frozen=True)
class UnpackedCost:
    """The costs of a block that differ where forward keeps the quantised weights that it unpacks for the backward right
    after it. The names are those of `BlockCost`."""

    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    backward_traffic_bytes: float
    backward_mix: CallMix


@dataclass(frozen=True)
class BlockCost:
    """The cost of one forward and one backward of a block on one micro-batch, as `costs.measure` finds it."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_traffic_bytes: float = 0.0
    backward_traffic_bytes: float = 0.0
    forward_mix: CallMix = NO_CALLS  # the calls that make up these sums
    backward_mix: CallMix = NO_CALLS
    kept_bytes: int = 0  # saved for backward, without parameters and without inputs
    saved_inputs: tuple[bool, ...] = ()  # per input of the block: does backward need it?
    saved_outputs: tuple[bool, ...] = ()  # per output: is it part of kept_bytes?
    forward_peak_bytes: int = 0  # the most that lives at once in forward, saved tensors and outputs included
    light_peak_bytes: int = 0  # the same without gradients
    backward_peak_bytes: int = 0  # the most that backward adds to what forward left, less what it has freed of that
    launches: int = 0  # aten calls in forward
    calls: tuple[CostlyCall, ...] | None = ()  # in order; None: they depend on the device or on gradients
    again: AgainCost | None = None  # where running forward again can be less than forward
    unread: AgainCost | None = None  # of it, where nothing reads the results of its parts in tiles that end it
    unpacked: UnpackedCost | None = None  # where forward can keep unpacked weights
    uncounted: tuple[str, ...] = ()  # operators whose workspace on a GPU is not known, and not in the peaks


@dataclass(frozen=True)
class Block:
    """A run of nodes. `inputs` and `outputs` are nodes of other blocks, shared nodes or placeholders."""

    name: str
    nodes: tuple[fx.Node, ...]
    hash: str = ""
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    param_bytes: int = 0  # in the dtype of the computation, each parameter once
    cost: BlockCost = field(default_factory=BlockCost)
    seconds: Mapping[str, TurnSeconds] = field(default_factory=dict)  # by device name, where it was measured
    layer: str = ""  # the layer that an operator belongs to

    def with_cost(self, cost: BlockCost) -> Block:
        return replace(self, cost=cost)


def node_inputs(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes outside `nodes` that `nodes` read, in order of first use."""
    inside = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in inside:
                found.setdefault(arg)
    return list(found)


def node_outputs(nodes: Iterable[fx.Node], wanted: Callable[[fx.Node], bool] = lambda user: True) -> list[fx.Node]:
    """The nodes of `nodes` that a `wanted` user outside reads, in order."""
    inside = set(nodes)
    return [n for n in nodes if any(user not in inside and wanted(user) for user in n.users)]


def structural_hash(
    graph: OpGraph,
    name: str,
    nodes: tuple[fx.Node, ...],
    inputs: Sequence[fx.Node],
    for_costs: bool = False,
) -> str:
    """A hash that is equal for blocks that do the same computation on the same shapes under the same local names.
    `for_costs`: without what costs do not depend on: the names of tensors, and the first class of a part of a head."""
    name = name.partition("#")[0]
    number: dict[fx.Node, str] = {n: f"in{i}" for i, n in enumerate(inputs)}
    text = [f"{number[n]} {_signature(n.meta.get('val'))}" for n in inputs]
    for i, node in enumerate(nodes):
        number[node] = f"v{i}"
        target = _target(graph, name, node, for_costs)
        args = node.args
        if for_costs and node.target is part_statistics and type(args[BEGIN]) is int:
            args = (*args[:BEGIN], 0, *args[BEGIN + 1 :])
        told = expressions_of(fx.node.map_arg((args, node.kwargs), lambda n: _Name(number[n])))
        in_evaluation = (node.meta.get("eval_args"), node.meta.get("eval_kwargs"))
        evaluation = expressions_of(fx.node.map_arg(in_evaluation, lambda n: _Name(number.get(n, "?"))))
        flags = (node.meta.get("no_grad"), node.meta.get("autocast"), node.meta.get("random"), *_look(node))
        path = _local(name, node.meta.get("module_path", ""))
        text.append(f"v{i} {node.op} {target} {told} {evaluation} {flags} {path} {_signature(node.meta.get('val'))}")
    outside = [number[n] for n in node_outputs(nodes)]
    text.append(f"out {outside}")
    if graph.sum_dtype is not None:
        text.append(f"sums {graph.sum_dtype}")
    if graph.pointwise_again:
        text.append("pointwise again")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _look(node: fx.Node) -> tuple[Any, ...]:
    mark = mark_of(node)
    return () if mark is None else mark.look


class _Name(str):
    """A string that prints without quotes inside argument tuples."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _local(block: str, path: str) -> str:
    return path[len(block) + 1 :] if block and (path == block or path.startswith(block + ".")) else path


def _target(graph: OpGraph, block: str, node: fx.Node, for_costs: bool) -> str:
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        held = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
        tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in held]
        return f"{_local(block, str(node.target))} {leaf!r} {_settings(leaf)} {tensors}"
    if node.op == "get_attr":
        trained = [(p.requires_grad,) for p in graph.node_parameters(node).values()]
        return f"{'' if for_costs else _local(block, str(node.target))} {trained}"
    if isinstance(node.target, str):
        return node.target
    owner = getattr(node.target, "__self__", None)  # the class of a custom autograd function
    name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    return f"{name} of {owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else name


def _settings(leaf: nn.Module) -> list[tuple[str, Any]]:
    """A module's plain attributes, some of which its `repr` may leave out (the heads of `nn.MultiheadAttention`)."""
    plain = (bool, int, float, str, tuple, type(None))
    own = [(path, key, value) for path, m in leaf.named_modules() for key, value in vars(m).items()]
    return sorted((f"{path}.{key}", value) for path, key, value in own if isinstance(value, plain))


def _signature(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    return str([(tuple(t.shape), str(t.dtype), t.requires_grad) for t in value_tensors(value)])
