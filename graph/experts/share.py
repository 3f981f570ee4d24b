"""A share of a layer's experts: the nodes that compute with some of its matrices, in place of those of the layer.

Subclasses say which experts a share has, and where their rows are: parts in stages of their own (`split_experts.py`),
or members of a team (`divide/member_experts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...runtime.experts.split_experts import part_product
from ..edit import GraphEdit, copy_edges, erase, erase_dead, replace_uses
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
        """The ends of the rows of each of its experts."""
        raise NotImplementedError

    def own_rows(self, rows: fx.Node) -> fx.Node:
        """The rows of a value, its own first."""
        raise NotImplementedError

    def product_rows(self, product: fx.Node, rows: Any) -> Any:
        """The operand of a product in place of its rows."""
        return rows

    def compute(self) -> dict[fx.Node, fx.Node]:
        """Compute the share of each value that leaves the layer. A weight is read first, so that the share's block
        begins there."""
        weights = [self._weight(product) for product in self.layer.products]
        offsets = self.own_offsets()
        for node in self.layer.entering:
            if is_of_rows(node, self.layer.rows):
                self.copies[node] = self.own_rows(node)
        for node in self.layer.inside:
            if node in self.layer.products:
                rows = self.product_rows(node, fx.map_arg(node.args[0], self._copy_of))
                weight = weights[self.layer.products.index(node)]
                self.copies[node] = self.call(part_product, rows, weight, offsets, self.layer.experts)
            else:
                self.copies[node] = self._copy_node(node)
        return {node: self.copies[node] for node in self.layer.leaving}

    def _copy_of(self, node: fx.Node) -> fx.Node:
        return self.copies.get(node, node)

    def _copy_node(self, node: fx.Node) -> fx.Node:
        with self.graph.graph.inserting_before(self.layer.inside[-1]):
            copy = self.graph.graph.node_copy(node, self._copy_of)
        copy.meta["module_path"] = self.edit.path
        copy_edges(node, copy, self._copy_of)
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
            with self.edit.fake_mode, torch.set_grad_enabled(not node.meta["no_grad"]):
                made = getattr(read.meta["val"], str(node.target))(*node.args[1:], **node.kwargs)
            base = None if node.meta["alias_of"] is None else read
            edit = GraphEdit(self.graph, self.layer.inside[-1], like=node)
            view = edit.put("call_method", str(node.target), (read, *node.args[1:]), made, dict(node.kwargs), base)
            view.meta["module_path"] = self.edit.path
            read = view
        return read


def replace_layers(graph: OpGraph, replaced: Sequence[tuple[ExpertLayer, dict[fx.Node, fx.Node]]]) -> None:
    """Let what reads layers read what stands for the nodes that leave them, and remove the layers with all that only
    they read."""
    replace_uses(graph, {old: new for _, leaving in replaced for old, new in leaving.items()})
    erase(graph, {node for layer, _ in replaced for node in layer.inside})
    erase_dead(graph)
