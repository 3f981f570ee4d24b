"""`split-experts`: layers of experts that are too large for a device become parts, each with some of the experts.

In: the op graph. Out: a graph in which each part's matrices are parameters of their own and, with what multiplies by
them, a block of its own, so that a partitioner may put each into another stage: fetched, run and updated alone, while
what is dense runs. `runtime/expert_parts.py` says how parts compute what the layer did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import fx

from ....ir.errors import PassError
from ....ir.units import format_bytes
from ....runtime.expert_parts import join_part, part_offsets, part_product, part_rows
from ...draft import Draft
from ..blocks import compute_dtype
from ..edit import GraphEdit
from ..graph_pass import GraphPass
from ..opgraph import OpGraph
from ..row_parts import (
    COPIES,
    SHARE,
    add_part,
    device_room,
    even_boundaries,
    refused_by_optimizer,
    wrong_boundaries,
)
from .layers import ExpertLayer, find_expert_layers, is_of_rows, weight_of

ExpertBoundaries = dict[str, list[int]]  # layer -> 0, the first expert of each further part, the number of experts


@dataclass(frozen=True)
class SplitExperts(GraphPass):
    """`parts`: of each layer of experts, or automatic: layers that take more than half of a device, into parts that do
    not."""

    name: ClassVar[str] = "split-experts"
    decides: ClassVar[str] = "experts"
    automatic: ClassVar[tuple[str, ...]] = ("parts",)
    parts: int = 0

    def plan(self, draft: Draft) -> ExpertBoundaries:
        """Raises `PassError` where `parts` is given and no layer can have so many."""
        found, refused = self.look(draft)
        if refused:
            draft.notes[self.name] = "; ".join(refused)
        if self.parts > 1 and not found:
            none = (
                "this model multiplies no groups of rows by experts' matrices; of transformers' implementations "
                'grouped_mm does: model.set_experts_implementation("grouped_mm")'
            )
            raise PassError(f"split-experts: {'; '.join(refused) or none}")
        return found

    def look(self, draft: Draft) -> tuple[ExpertBoundaries, list[str]]:
        """What to split, and why large layers cannot be."""
        found: ExpertBoundaries = {}
        refused = []
        for name, layer in find_expert_layers(draft.graph).items():
            count = self.parts or _parts_needed(layer, device_room(draft))
            refusal = layer.refusal or _refused_by_optimizer(draft, layer)
            if count > 1 and not refusal and self.parts > layer.experts:
                refusal = f"it has {layer.experts} experts only"
            if count > 1 and refusal:
                refused.append(f"{name} stays whole: {refusal}")
            elif count > 1:
                found[name] = even_boundaries(layer.experts, min(count, layer.experts))
        return found, refused

    def rewrite(self, draft: Draft, decision: ExpertBoundaries) -> None:
        if not decision:
            return
        layers = find_expert_layers(draft.graph)
        for name, experts in decision.items():
            _check(draft, layers, name, experts)
        graph = draft.graph.copy()
        layers = find_expert_layers(graph)
        for name, experts in decision.items():
            split_layer(graph, layers[name], experts)
        draft.graph = graph.copy()  # over what its nodes read now
        told = [f"the experts of {name} are {len(experts) - 1} parts" for name, experts in decision.items()]
        draft.notes[self.name] = "; ".join([*filter(None, [draft.notes.get(self.name)]), *told])


def _parts_needed(layer: ExpertLayer, room_bytes: int) -> int:
    """The number of parts of which each takes at most its share of a device."""
    return math.ceil(layer.bytes * (COPIES if layer.is_trained else 1) / (SHARE * room_bytes))


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


def split_layer(graph: OpGraph, layer: ExpertLayer, experts: Sequence[int]) -> None:
    """Put parts in the place of a layer's products and of what is computed between them."""
    found: dict[fx.Node, fx.Node] = {}
    for begin, end in pairwise(experts):
        part = _Part(graph, layer, begin, end)
        results = part.compute()
        for node in layer.leaving:
            found[node] = part.call(join_part, found.get(node), results[node], layer.offsets, begin, end)
    edit = GraphEdit(graph, layer.inside[-1])
    for node in reversed(layer.inside):
        if node in found:
            edit.replace(node, found[node])
        else:
            graph.graph.erase_node(node)
    for node in reversed(graph.nodes):
        if node.op != "output" and not node.users and _only_reads(graph, node, layer):
            graph.graph.erase_node(node)


def _only_reads(graph: OpGraph, node: fx.Node, layer: ExpertLayer) -> bool:
    """Whether a node is the read of a whole weight of a layer, or a view of it, which nothing needs any more."""
    while node.op == "call_method" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr" and graph.ties().get(str(node.target), str(node.target)) in layer.weights


class _Part:
    """One part of a layer: its parameters, and the nodes that compute with them, before the last one of the layer."""

    def __init__(self, graph: OpGraph, layer: ExpertLayer, begin: int, end: int):
        self.graph, self.layer, self.begin, self.end = graph, layer, begin, end
        self.edit = GraphEdit(graph, layer.inside[-1])
        self.call = self.edit.call
        self.edit.path = f"{layer.name}[{begin}:{end}]"
        self.copies: dict[fx.Node, fx.Node] = {}

    def compute(self) -> dict[fx.Node, fx.Node]:
        """The part's nodes by those of the layer. A weight is read first, so that the part's block begins there."""
        weights = [self.weight(product) for product in self.layer.products]
        offsets = self.call(part_offsets, self.layer.offsets, self.begin, self.end, view_of=self.offsets_shared())
        for node in self.layer.entering:
            if is_of_rows(node, self.layer.rows):
                shared = node if self.begin == 0 else None
                self.copies[node] = self.call(part_rows, node, self.layer.offsets, self.begin, view_of=shared)
        for node in self.layer.inside:
            if node in self.layer.products:
                rows = fx.map_arg(node.args[0], self.copy_of)
                weight = weights[self.layer.products.index(node)]
                self.copies[node] = self.call(part_product, rows, weight, offsets, self.layer.experts)
            else:
                self.copies[node] = self.copied(node)
        return self.copies

    def offsets_shared(self) -> fx.Node | None:
        return self.layer.offsets if self.begin == 0 else None

    def copy_of(self, node: fx.Node) -> fx.Node:
        return self.copies.get(node, node)

    def copied(self, node: fx.Node) -> fx.Node:
        with self.graph.graph.inserting_before(self.layer.inside[-1]):
            copy = self.graph.graph.node_copy(node, self.copy_of)
        copy.meta = {**node.meta, "module_path": self.edit.path}
        for key in ("mutates", "alias_of", "eval_args", "eval_kwargs"):
            if key in copy.meta:
                copy.meta[key] = fx.map_arg(copy.meta[key], self.copy_of)
        return copy

    def weight(self, product: fx.Node) -> fx.Node:
        """The part's matrices as a product takes them."""
        found = weight_of(self.graph, product)
        assert found is not None
        name, chain = found
        part = add_part(self.graph, name, self.layer.weights[name], self.begin, self.end)
        value = self.graph.parts[part].tensor
        read = self.edit.parameter(part, value, compute_dtype(self.graph, value))
        for node in chain[1:]:
            with self.graph.graph.inserting_before(self.layer.inside[-1]):
                view = self.graph.graph.call_method(str(node.target), (read, *node.args[1:]), dict(node.kwargs))
            with self.edit.fake_mode, torch.set_grad_enabled(not node.meta["no_grad"]):
                made = getattr(read.meta["val"], str(node.target))(*node.args[1:], **node.kwargs)
            alias = read if node.meta["alias_of"] is not None else None
            view.meta = {**node.meta, "val": made, "module_path": self.edit.path, "alias_of": alias}
            view.meta.pop("dims", None)
            read = view
        return read
