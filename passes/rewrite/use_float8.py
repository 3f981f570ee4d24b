"""`use-float8`: products of linear layers in float8, by the recipe of the plan's precision.

In: the op graph, after all other passes over it. Out: the same graph in which each decided `nn.Linear` is one call of
`functions.linear_float8`. Layers are those that torchao's cards can multiply, with dimensions divisible by 16, but for
two kinds that lose most and gain least: output heads, and narrow ones such as adapters. Whole layers only: what other
passes have divided would be scaled by parts. (Micikevicius et al. 2022, "FP8 formats for deep learning".)
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn

from ...graph.edit import GraphEdit, copy_graph, evaluation_of, set_evaluation
from ...graph.layers import is_in_list, list_element
from ...graph.opgraph import OpGraph
from ...ir.errors import PassError
from ...ir.precision import Precision
from ...ir.program import Program
from ...ir.regions import mark_of
from ...runtime.functions import linear_float8
from ...runtime.functions.linear_float8 import ALIGNED
from ..base import Explanation, Pass
from ..decisions import Decision
from ..draft import Draft
from .fuse_pointwise import FusePointwise
from .graph_pass import GraphPass

HEAD = "the output head"
NARROW = 16  # times as long as it is wide: casts of such a weight's operands take longer than its product saves


@dataclass(frozen=True)
class UseFloat8(GraphPass):
    """`head`: output heads, too. The recipe is that of the precision."""

    name: ClassVar[str] = "use-float8"
    # linear layers whose products are in float8
    decides: ClassVar[tuple[Decision, ...]] = (Decision("float8", list[str], []),)
    closes: ClassVar[tuple[str, ...]] = (*FusePointwise.closes, FusePointwise.name)
    head: bool = False

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["head in float8"] if self.head else []  # every candidate of such a precision has the pass

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        lines = [] if not decisions.float8 else [f"multiplied in float8: {_kinds(decisions.float8)}"]
        return Explanation(lines, heading="float8" if lines else "")

    def plan(self, draft: Draft) -> list[str]:
        """The paths of the layers. Raises `PassError` where there is none, or where other passes have divided some."""
        require_whole(draft.graph)
        reasons = _reasons(draft.graph)
        layers = [path for path, reason in reasons.items() if not reason or (self.head and reason == HEAD)]
        if not layers:
            told = "; ".join(f"{path}: {reason}" for path, reason in list(reasons.items())[:3])
            raise PassError(f"use-float8: no linear layer can be in float8 ({told or 'the model has none'})")
        return layers

    def rewrite(self, draft: Draft, decision: list[str]) -> None:
        recipe = Precision.of(draft.options.precision).float8
        if not recipe:
            raise PassError(
                f'use-float8 with precision="{draft.options.precision}", which has no recipe of float8; allowed are '
                '"fp8-rowwise", "fp8-tensorwise" and "fp8-rowwise-gw-hp"'
            )
        require_whole(draft.graph)
        reasons = _reasons(draft.graph)
        for path in decision:
            _check(draft.graph, reasons, path)
        emulate = draft.machine.devices[0].kind == "cpu"
        draft.graph = convert_to_float8(draft.graph, decision, recipe, emulate)
        draft.notes[self.name] = _note(reasons, set(decision), emulate)


def convert_to_float8(graph: OpGraph, layers: Collection[str], recipe: str, emulate: bool) -> OpGraph:
    """The same graph with the products of these linear layers in float8."""
    graph, chosen = copy_graph(graph), set(layers)
    for node in graph.nodes:
        if _linear(graph, node) is not None and str(node.target) in chosen:
            _rewrite(graph, node, recipe, emulate)
    graph.rebuild()
    return graph


def _linear(graph: OpGraph, node: fx.Node) -> nn.Linear | None:
    """The layer that a node calls, if that is a whole `nn.Linear` with torch's own forward."""
    if node.op != "call_module":
        return None
    leaf = graph.module.get_submodule(str(node.target))
    is_plain = isinstance(leaf, nn.Linear) and type(leaf).forward is nn.Linear.forward
    return leaf if is_plain else None  # type: ignore[return-value]


def _reasons(graph: OpGraph) -> dict[str, str]:
    """The linear layers that the graph calls, by path, and why each is not in float8; "" where it is."""
    leading, found = _leading(graph), dict[str, str]()
    for node in graph.nodes:
        layer = _linear(graph, node)
        if layer is None:
            continue
        path, sizes = str(node.target), layer.weight.shape
        is_head = node not in leading and not is_in_list(list_element(path))
        if any(size % ALIGNED for size in sizes):
            reason = f"its {sizes[0]} x {sizes[1]} are not divisible by {ALIGNED}"
        elif max(sizes) > NARROW * min(sizes):
            reason = "narrow"
        else:
            reason = HEAD if is_head else ""
        found[path] = found.get(path, "") or reason
    return found


def _leading(graph: OpGraph) -> set[fx.Node]:
    """The nodes from whose values a product with a matrix of the model is made."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in found or _has_matrix(graph, user) for user in node.users):
            found.add(node)
    return found


def _has_matrix(graph: OpGraph, node: fx.Node) -> bool:
    """Whether a node multiplies by, or reads, a matrix among the parameters."""
    reads = [node, *(arg for arg in node.all_input_nodes if arg.op == "get_attr")]
    return any(p.dim() > 1 for each in reads for p in graph.node_parameters(each).values())


def _check(graph: OpGraph, reasons: dict[str, str], path: str) -> None:
    """Raise `PassError` for a layer, perhaps of an edited plan, that cannot be in float8."""
    if path not in reasons:
        near = ", ".join(difflib.get_close_matches(path, reasons, 3, 0.0)) or "none"
        raise PassError(f"use-float8: {path!r} is no linear layer that the model calls as a whole; nearest: {near}")
    if "divisible" in reasons[path]:
        raise PassError(f"use-float8: {path!r} cannot be in float8: {reasons[path]}")


def require_whole(graph: OpGraph) -> None:
    """Raise `PassError` where other passes have divided linear layers, or their tokens: scales would be of parts."""
    if graph.team > 1:
        raise PassError(
            f"use-float8: {graph.team} devices divide the work inside layers, so that scales would be of parts. Use "
            'whole layers (leave split-context and split-width out), or precision="bf16-true"'
        )
    for node in graph.nodes:
        if _linear(graph, node) is not None and mark_of(node) is not None:
            raise PassError(
                f"use-float8: {node.target} runs over tiles of tokens, so that scales would be of tiles. Leave "
                'tile-sequence out, or use precision="bf16-true"'
            )
    owners = {f"{path}.weight" for path, module in graph.model.named_modules() if isinstance(module, nn.Linear)}
    leading = _leading(graph)
    for node in graph.nodes:
        part = graph.parts.get(str(node.target)) if node.op == "get_attr" else None
        if part is not None and part.part.parameter in owners and any(user in leading for user in node.users):
            raise PassError(
                f"use-float8: {part.part.parameter} is in parts, so that scales would be of parts. Leave split-linear "
                'out, or use precision="bf16-true"'
            )


def _rewrite(graph: OpGraph, node: fx.Node, recipe: str, emulate: bool) -> None:
    layer, path = _linear(graph, node), str(node.target)
    assert layer is not None
    edit = GraphEdit(graph, node)
    weight = edit.parameter(f"{path}.weight", layer.weight)
    held = [weight] if layer.bias is None else [weight, edit.parameter(f"{path}.bias", layer.bias)]
    how: dict[str, Any] = {"recipe": recipe, **({"emulate": True} if emulate else {})}
    call = edit.call(linear_float8, _operand(node.args, node.kwargs), *held, **how)
    evaluation = evaluation_of(node)
    if evaluation is not None:
        set_evaluation(call, ((_operand(*evaluation), *held), how))
    edit.replace(node, call)


def _operand(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _note(reasons: dict[str, str], chosen: set[str], emulate: bool) -> str:
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        if path not in chosen:
            by_reason.setdefault(reason or "left out of the plan", []).append(path)
    told = ["scales are those of a micro-batch: other micro-batches round otherwise"]
    told += ["emulated in fp32, as CPU devices have no float8"] if emulate else []
    return "; ".join([*told, *(f"not in float8: {_kinds(paths)} ({why})" for why, paths in by_reason.items())])


def _kinds(paths: Iterable[str]) -> str:
    """Layers with their numbers left out: "4 of layers.*.up, head"."""
    kinds = Counter(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in paths)
    return ", ".join(f"{count} of {kind}" if count > 1 else kind for kind, count in kinds.items())
