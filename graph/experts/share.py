"""A share of a layer's experts: the nodes that compute with some of its matrices, in place of those of the layer.

What has which experts, and where their rows lie, subclasses say: parts in stages of their own (`split_experts.py`), or
members of a team (`divide/member_experts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...runtime.experts.split_experts import part_product
from ..edit import GraphEdit, replace_all
from ..opgraph import OpGraph
from .layers import ExpertLayer, is_of_rows, weight_of


class ExpertShare:
    """One share of a layer: its parameters, and the nodes that compute with them, before the last one of the layer."""

    def __init__(self, graph: OpGraph, layer: ExpertLayer, path: str, ties: Mapping[str, str] | None = None):
        self.graph, self.layer = graph, layer
        self.edit = GraphEdit(graph, layer.inside[-1])
        self.call = self.edit.call
        self.edit.path = path
        self.copies: dict[fx.Node, fx.Node] = {}
        self.ties = graph.ties() if ties is None else ties

    def parameter(self, whole: str) -> str:
        """The name in `graph.parts` of what the share has of a parameter."""
        raise NotImplementedError

    def own_offsets(self) -> fx.Node:
        """Where the rows of each of its experts end."""
        raise NotImplementedError

    def own_rows(self, rows: fx.Node) -> fx.Node:
        """The rows of a value, its own first."""
        raise NotImplementedError

    def multiplied(self, product: fx.Node, rows: Any) -> Any:
        """What a product takes in place of its rows."""
        return rows

    def compute(self) -> dict[fx.Node, fx.Node]:
        """What it gives for each value that leaves the layer. A weight is read first, so that the share's block begins
        there."""
        weights = [self._weight(product) for product in self.layer.products]
        offsets = self.own_offsets()
        for node in self.layer.entering:
            if is_of_rows(node, self.layer.rows):
                self.copies[node] = self.own_rows(node)
        for node in self.layer.inside:
            if node in self.layer.products:
                rows = self.multiplied(node, fx.map_arg(node.args[0], self._copy_of))
                weight = weights[self.layer.products.index(node)]
                self.copies[node] = self.call(part_product, rows, weight, offsets, self.layer.experts)
            else:
                self.copies[node] = self._copied(node)
        return {node: self.copies[node] for node in self.layer.leaving}

    def _copy_of(self, node: fx.Node) -> fx.Node:
        return self.copies.get(node, node)

    def _copied(self, node: fx.Node) -> fx.Node:
        with self.graph.graph.inserting_before(self.layer.inside[-1]):
            copy = self.graph.graph.node_copy(node, self._copy_of)
        copy.meta = {**node.meta, "module_path": self.edit.path}
        for key in ("mutates", "alias_of", "eval_args", "eval_kwargs"):
            if key in copy.meta:
                copy.meta[key] = fx.map_arg(copy.meta[key], self._copy_of)
        return copy

    def _weight(self, product: fx.Node) -> fx.Node:
        """The share's matrices as a product takes them."""
        found = weight_of(self.graph, product, self.ties)
        assert found is not None
        name, chain = found
        part = self.parameter(name)
        value = self.graph.parts[part].tensor
        read = self.edit.parameter(part, value)
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


def replace_layers(graph: OpGraph, replaced: Sequence[tuple[ExpertLayer, dict[fx.Node, fx.Node]]]) -> None:
    """Let what reads layers read what was found for the nodes that leave them, and remove the layers with the reads of
    their weights."""
    replace_all(graph, {old: new for _, found in replaced for old, new in found.items()})
    for layer, found in replaced:
        for node in reversed(layer.inside):
            if node not in found:
                graph.graph.erase_node(node)
    ties, weights = graph.ties(), {name for layer, _ in replaced for name in layer.weights}
    for node in reversed(graph.nodes):
        if node.op != "output" and not node.users and _read_by(node, ties) in weights:
            graph.graph.erase_node(node)


def _read_by(node: fx.Node, ties: Mapping[str, str]) -> str:
    """The first name of what a node reads, or is a view of; empty for other nodes."""
    while node.op == "call_method" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return ties.get(str(node.target), str(node.target)) if node.op == "get_attr" else ""
