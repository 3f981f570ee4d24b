"""`split-experts`: layers of experts that are too large for a device become parts, each with some of the experts.

In: the op graph. Out: a graph in which each part's matrices are parameters of their own and, with what multiplies by
them, a block of its own, so that a partitioner may put each into another stage: fetched, run and updated alone, while
what is dense runs. `runtime/experts/split_experts.py` says how parts compute what the layer did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx, nn

from ...graph.edit import copy_graph
from ...graph.experts.layers import ExpertLayer, find_expert_layers
from ...graph.experts.share import ExpertShare, replace_layers
from ...graph.opgraph import OpGraph
from ...graph.row_parts import add_part, even_boundaries, wrong_boundaries
from ...ir.errors import PassError
from ...ir.program import TeamPart
from ...ir.units import format_bytes
from ...runtime.experts.split_experts import join_part, part_offsets, part_rows
from ..decisions import Decision
from ..draft import Draft
from .rows_in_parts import SHARE, RowBoundaries, RowsInParts, device_room, few, refused_by_optimizer

BUFFERS = 2  # of a part in DRAM: one is read from SSD while another one is updated and written
DRAM_SHARE = 0.25  # of DRAM that such buffers of all devices take at most
OF_ROWS = 3  # what a part holds over its rows' values: gradients, copies in order, what waits to enter or to leave


@dataclass(frozen=True)
class SplitExperts(RowsInParts):
    """`parts`: of each layer of experts, or automatic: layers that take more than half of a device, into parts that do
    not. Where weights and states fill all memory but SSDs, parts are so small, too, that those that all devices update
    at one time take a quarter of DRAM."""

    name: ClassVar[str] = "split-experts"
    rank: ClassVar[int] = 12
    # layer -> 0, the first expert of each further part, the number of experts
    decides: ClassVar[tuple[Decision, ...]] = (Decision("experts", RowBoundaries, {}),)

    def lacks(self, draft: Draft) -> str:
        return _divided_before(draft.graph) or (
            "this model multiplies no groups of rows by experts' matrices; of transformers' implementations "
            'grouped_mm does: model.set_experts_implementation("grouped_mm")'
        )

    def look(self, draft: Draft) -> tuple[RowBoundaries, list[str]]:
        """The layers to split, and the reasons why other large layers cannot be split."""
        found: RowBoundaries = {}
        refused: dict[str, list[str]] = {}
        updated_bytes = self._updated_bytes(draft)
        for name, layer in draft.graph.once(find_expert_layers).items():
            count = self.parts or math.ceil(layer.held_bytes / (SHARE * device_room(draft)))
            if count > 1 and not self.parts:
                count = max(count, _equal_parts(layer, _all_bytes(draft, layer.weights) / updated_bytes))
            refusal = layer.refusal or _refused_by_optimizer(draft, layer)
            if count > 1 and not refusal and self.parts > layer.experts:
                refusal = f"it has {layer.experts} experts only"
            if count > 1 and refusal:
                refused.setdefault(refusal, []).append(name)
            elif count > 1:
                found[name] = even_boundaries(layer.experts, min(count, layer.experts))
        return found, [f"{few(names)} whole: {refusal}" for refusal, names in refused.items()]

    def _updated_bytes(self, draft: Draft) -> float:
        """The bytes that a part may have, with gradients and states, where these come from SSD: DRAM holds all that
        each device reads, updates and writes. Infinite where devices and DRAM hold everything."""
        machine, hosts = draft.machine, range(len(draft.machine.hosts))
        dram = sum(machine.dram_budget_bytes(host) for host in hosts)
        room = dram + sum(device.budget_bytes for device in machine.devices)
        if self.parts or not any(machine.hosts[host].ssds for host in hosts):
            return math.inf
        if _all_bytes(draft, draft.graph.parameters()) <= room:
            return math.inf
        return max(1.0, DRAM_SHARE * dram / machine.num_devices / BUFFERS)

    def must_divide(self, draft: Draft) -> bool:
        """Whether some layer that can be split is too large for every device while it is whole."""
        most_bytes = max(device.budget_bytes for device in draft.machine.devices)
        layers = [row for row in draft.graph.once(find_expert_layers).values() if row.held_bytes > most_bytes]
        return any(not (layer.refusal or _refused_by_optimizer(draft, layer)) for layer in layers)

    def has_room(self, draft: Draft, times: float) -> bool:
        """Whether `times` the rows of the graph's micro-batch fit beside a part of any layer."""
        layers = draft.graph.once(find_expert_layers).values()
        most_bytes = max((layer.row_bytes for layer in layers), default=0)
        return OF_ROWS * times * most_bytes <= (1 - SHARE) * device_room(draft)

    def rewrite(self, draft: Draft, decision: RowBoundaries) -> None:
        if not decision:
            return
        layers = draft.graph.once(find_expert_layers)
        for name, experts in decision.items():
            _check(draft, layers, name, experts)
        graph = copy_graph(draft.graph)
        layers = find_expert_layers(graph)
        split_layers(graph, [(layers[name], experts) for name, experts in decision.items()])
        draft.graph = copy_graph(graph)  # over what its nodes read now
        told = [f"the experts of {name} are {len(experts) - 1} parts" for name, experts in decision.items()]
        self.tell(draft, told)


def _divided_before(graph: OpGraph) -> str:
    """The way out where members of a team have divided experts before; empty where they have not."""
    if not any(isinstance(row.part, TeamPart) and row.tensor.dim() == 3 for row in graph.parts.values()):
        return ""
    told, way = ("split-context", "set its option experts=false") if graph.apart else ("split-width", "put it after")
    return f"{told}, which comes before it, has divided experts among {graph.team} members; {way}"


def _equal_parts(layer: ExpertLayer, least: float) -> int:
    """The smallest number of parts, `least` at least, that have equally many experts."""
    return next((n for n in range(1, layer.experts + 1) if layer.experts % n == 0 and n >= least), layer.experts)


def _all_bytes(draft: Draft, weights: Mapping[str, nn.Parameter]) -> int:
    """Bytes of weights with their gradients, masters and states, each once."""
    distinct = {id(weight): (name, weight) for name, weight in weights.items()}.values()
    specs = [draft.graph.param_spec(name, weight) for name, weight in distinct]
    sums = sum(spec.grad_bytes for spec in specs if spec.requires_grad)
    return sums + sum(spec.bytes for spec in specs) + draft.options.optimizer_bytes(specs)


def _refused_by_optimizer(draft: Draft, layer: ExpertLayer) -> str:
    found = (refused_by_optimizer(draft, name, weight) for name, weight in layer.weights.items())
    return next(filter(None, found), "")


def _check(draft: Draft, layers: dict[str, ExpertLayer], name: str, experts: Sequence[int]) -> None:
    """Raise `PassError` for a decision, perhaps edited, that is none about this model."""
    if name not in layers:
        known = ", ".join(layers) or "none"
        raise PassError(f"split-experts: {name!r} is no layer of experts of this model; there are {known}")
    layer = layers[name]
    wrong = wrong_boundaries(experts, layer.experts)
    if wrong:
        raise PassError(f"split-experts: the parts of {name} begin at experts {list(experts)}; {wrong}")
    refusal = layer.refusal or _refused_by_optimizer(draft, layer)
    if refusal:
        raise PassError(f"split-experts: {name} ({format_bytes(layer.bytes)}) cannot be split: {refusal}")


def split_layers(graph: OpGraph, split: Sequence[tuple[ExpertLayer, Sequence[int]]]) -> None:
    """Put parts in the place of layers' products and of what is computed between them."""
    replaced, ties = [], graph.ties()
    for layer, experts in split:
        found: dict[fx.Node, fx.Node] = {}
        for begin, end in pairwise(experts):
            part = _Part(graph, layer, begin, end, ties)
            for node, result in part.compute().items():
                found[node] = part.call(join_part, found.get(node), result, layer.offsets, begin, end)
        replaced.append((layer, found))
    replace_layers(graph, replaced)


class _Part(ExpertShare):
    """Some experts of a layer, from `begin` to before `end`."""

    def __init__(self, graph: OpGraph, layer: ExpertLayer, begin: int, end: int, ties: Mapping[str, str]):
        super().__init__(graph, layer, f"{layer.name}[{begin}:{end}]", ties)
        self.begin, self.end = begin, end

    def parameter(self, whole: str) -> str:
        return add_part(self.graph, whole, self.layer.weights[whole], self.begin, self.end)

    def own_offsets(self) -> fx.Node:
        shared = self.layer.offsets if self.begin == 0 else None
        return self.call(part_offsets, self.layer.offsets, self.begin, self.end, view_of=shared)

    def own_rows(self, rows: fx.Node) -> fx.Node:
        shared = rows if self.begin == 0 else None
        return self.call(part_rows, rows, self.layer.offsets, self.begin, view_of=shared)
