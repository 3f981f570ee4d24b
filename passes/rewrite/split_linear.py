"""`split-linear`: large weights of linear layers become parts, each with some of the rows.

In: the op graph. Out: a graph in which each part is a parameter and a block of its own, and which is cut before and
after the parts, so that a layer becomes several blocks: a partitioner may put each into another stage, which is
fetched, run and updated alone. `graph/products/split_product.py` says how parts compute what the layer did.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from torch import fx, nn

from ...graph.edit import copy_graph
from ...graph.layers import list_element
from ...graph.opgraph import OpGraph, value_tensors
from ...graph.products.products import LinearWeight, find_linear_weights
from ...graph.products.split_product import split_weights
from ...graph.row_parts import even_boundaries, held_bytes, wrong_boundaries
from ...ir.errors import PassError
from ...ir.units import format_bytes
from ..decisions import Decision
from ..draft import Draft
from .rows_in_parts import SHARE, RowBoundaries, RowsInParts, device_room, few, refused_by_optimizer


@dataclass(frozen=True)
class SplitLinear(RowsInParts):
    """`parts`: of each weight, or automatic: where a layer takes more than half of a device, its largest weights, until
    neither the rest of the layer nor a part does."""

    name: ClassVar[str] = "split-linear"
    rank: ClassVar[int] = 13
    # weight of a linear layer -> 0, the first row of each further part, the number of rows
    decides: ClassVar[tuple[Decision, ...]] = (Decision("linear", RowBoundaries, {}),)

    def lacks(self, draft: Draft) -> str:
        return _refusal_of_team(draft.graph) or "this model has no linear layers"

    def look(self, draft: Draft) -> tuple[RowBoundaries, list[str]]:
        """The weights to split, and the reasons why others cannot be split."""
        found: RowBoundaries = {}
        refused: dict[str, list[str]] = defaultdict(list)
        if _refusal_of_team(draft.graph):
            return {}, []
        for layer in _layers(draft).values():
            able: dict[str, LinearWeight] = {}
            for name, weight in layer.linear.items():
                refusal = _refusal(draft, weight) or (
                    f"it has {weight.rows} rows only" if weight.rows < max(self.parts, 2) else ""
                )
                if not refusal:
                    able[name] = weight
                elif self.parts > 1 or layer.is_large:
                    refused[refusal].append(name)
            counts = dict.fromkeys(able, self.parts) if self.parts else _counts(draft, layer, able)
            found |= {name: even_boundaries(able[name].rows, count) for name, count in counts.items() if count > 1}
        return found, [f"{few(names)} whole: {refusal}" for refusal, names in refused.items()]

    def must_divide(self, draft: Draft) -> bool:
        """Whether some layer of which weights can be split is too large for every device while it is whole."""
        most_bytes = max(device.budget_bytes for device in draft.machine.devices)
        split = self.look(draft)[0]
        large = [layer for layer in _layers(draft).values() if layer.held_bytes > most_bytes]
        return any(name in split for layer in large for name in layer.linear)

    def has_room(self, draft: Draft, times: float) -> bool:
        """Whether the values of `times` the rows of the graph's micro-batch fit beside a part of any layer."""
        most_bytes = max((layer.value_bytes for layer in _layers(draft).values()), default=0)
        return times * most_bytes <= (1 - SHARE) * device_room(draft)

    def rewrite(self, draft: Draft, decision: RowBoundaries) -> None:
        if not decision:
            return
        weights = draft.graph.once(find_linear_weights)
        for name, rows in decision.items():
            _check(draft, weights, name, rows)
        graph = copy_graph(draft.graph)
        weights = find_linear_weights(graph)
        split_weights(graph, [(weights[name], rows) for name, rows in decision.items()])
        graph.rebuild()
        draft.graph = graph
        by_count: dict[int, list[str]] = defaultdict(list)
        for name, rows in decision.items():
            by_count[len(rows) - 1].append(name)
        told = [f"{few(names, 'is', 'are')} in {count} parts" for count, names in sorted(by_count.items())]
        self.tell(draft, told)


@dataclass
class _Layer:
    """A layer's parameters, the weights of its linear layers among them, and bytes: of what a device holds of the
    parameters, and of all values that forward computes."""

    parameters: dict[str, nn.Parameter]
    linear: dict[str, LinearWeight]
    held_bytes: int = 0
    value_bytes: int = 0
    is_large: bool = False


def _layers(draft: Draft) -> dict[str, _Layer]:
    """The elements of module lists and other modules that have linear layers, by path."""
    graph, room = draft.graph, SHARE * device_room(draft)
    found: dict[str, _Layer] = {}
    for name, weight in graph.once(find_linear_weights).items():
        found.setdefault(_place(weight.products[0].node), _Layer({}, {})).linear[name] = weight
    for node in graph.nodes:
        layer = found.get(_place(node))
        if layer is not None:
            layer.parameters |= graph.node_parameters(node)
            if node.op not in ("get_attr", "output") and node.meta["alias_of"] is None:
                layer.value_bytes += sum(tensor.nbytes for tensor in value_tensors(node.meta["val"]))
    for layer in found.values():
        layer.held_bytes = held_bytes(graph, {id(p): p for p in layer.parameters.values()}.values())
        layer.is_large = layer.held_bytes > room
    return found


def _place(node: fx.Node) -> str:
    """The path of the element of a module list, or of the module, that a node ran in."""
    return list_element(str(node.meta.get("module_path", "")))


def _counts(draft: Draft, layer: _Layer, able: Mapping[str, LinearWeight]) -> dict[str, int]:
    """The number of parts of each weight that is split: the largest weights, until the rest takes its share of a
    device at most, each into parts that do."""
    share = SHARE * device_room(draft)
    rest = {id(p): p for p in layer.parameters.values()}
    counts: dict[str, int] = {}
    for name, weight in sorted(able.items(), key=lambda row: -row[1].value.numel()):
        if held_bytes(draft.graph, rest.values()) <= share:
            break
        rest.pop(id(weight.value), None)
        count = math.ceil(held_bytes(draft.graph, [weight.value]) / share)
        counts[name] = min(max(count, 2), weight.rows)
    return counts


def _refusal(draft: Draft, weight: LinearWeight) -> str:
    """The reason why a weight stays whole; empty where it can be split."""
    parameters = draft.graph.once(OpGraph.parameters)
    own = [(weight.name, weight.value), *((name, parameters[name]) for name in weight.biases)]
    refused = (refused_by_optimizer(draft, name, value) for name, value in own)
    return weight.refusal or next(filter(None, refused), "")


def _refusal_of_team(graph: OpGraph) -> str:
    """The way out where members of a team have divided layers before; empty without a team."""
    if graph.team == 1:
        return ""
    return (
        f"the work inside layers is divided among {graph.team} members already; put split-linear before split-context, "
        "or leave it out where split-width divides the layers"
    )


def _check(draft: Draft, weights: Mapping[str, LinearWeight], name: str, rows: Sequence[int]) -> None:
    """Raise `PassError` for a decision, perhaps edited, that is none about this model."""
    if name not in weights:
        team = _refusal_of_team(draft.graph)
        known = team or f"nearest: {', '.join(get_close_matches(name, weights, n=3, cutoff=0)) or 'none'}"
        raise PassError(f"split-linear: {name!r} is no weight of a linear layer of this model; {known}")
    weight = weights[name]
    wrong = wrong_boundaries(rows, weight.rows)
    if wrong:
        raise PassError(f"split-linear: the parts of {name} begin at rows {list(rows)}; {wrong}")
    refusal = _refusal(draft, weight)
    if refusal:
        size = weight.value.numel() * draft.graph.compute_dtype(weight.value).itemsize
        raise PassError(f"split-linear: {name} ({format_bytes(size)}) cannot be split: {refusal}")
