"""Linear layers in parts: each part multiplies with some rows of the weight, one after the other.

Rows of a weight [out, in] give some of the outputs, which are put side by side. Rows of a weight [in, out] (`addmm`, as
in GPT-2) meet some of the inputs, and each part adds its product to the sum of the parts before it. Products of the
same inputs, such as queries, keys and values, have their parts one after the other before anything is computed of their
results, so that no block between them holds what reads several results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...ir.edges import storage_root
from ..dataflow import Dataflow
from ..edit import GraphEdit, erase_dead, replace_all
from ..opgraph import OpGraph
from ..row_parts import add_part
from .products import LinearWeight, WideProduct


def split_weights(graph: OpGraph, split: Sequence[tuple[LinearWeight, Sequence[int]]]) -> None:
    """Make parts of weights, and of the biases of their rows, and let the products read them."""
    parameters, written = graph.parameters(), Dataflow(graph.nodes).written_by
    pairs = [(product, rows) for weight, rows in split for product in weight.products]
    new: dict[fx.Node, fx.Node] = {}
    places: dict[Any, fx.Node] = {}  # inputs, and modes -> before which node their first product's parts end
    for product, rows in sorted(pairs, key=lambda pair: pair[0].node):
        made = _ProductInParts(graph, parameters, product, rows)
        new[product.node] = made.sum() if product.adds_first else made.columns()
        key = (product.hidden, product.node.meta["no_grad"], product.node.meta["autocast"])
        place = places.setdefault(key, product.node if product.adds_first else new[product.node])
        if place not in (product.node, new[product.node]) and storage_root(product.hidden) not in written:
            for node in made.nodes:
                place.prepend(node)
    replace_all(graph, new)
    erase_dead(graph)


class _ProductInParts:
    """A product with a weight whose parts begin at `rows`."""

    def __init__(
        self, graph: OpGraph, parameters: Mapping[str, nn.Parameter], product: WideProduct, rows: Sequence[int]
    ):
        self.graph, self.parameters, self.product, self.rows = graph, parameters, product, rows
        self.edit = GraphEdit(graph, product.node)
        self.nodes: list[fx.Node] = []  # of the parts, in order

    def columns(self) -> fx.Node:
        """The outputs of all parts side by side."""
        product, made = self.product, []
        for begin, end in self.each():
            weight = self.read(product.weight, begin, end)
            bias = self.read(product.bias, begin, end) if product.bias else None
            made.append(self.call(F.linear, product.hidden, weight, bias))
            dims = product.node.meta.get("dims")
            made[-1].meta["dims"] = (*dims[:-1], end - begin) if dims else ()
        return self.edit.call(torch.cat, made, -1)

    def sum(self) -> fx.Node:
        """The bias and the products of all parts, added up one after the other."""
        product, found = self.product, None
        for begin, end in self.each():
            weight = self.read(product.weight, begin, end)
            if found is None:
                found = self.edit.parameter(product.bias, self.parameters[product.bias])
                self.nodes.append(found)
            inputs = self.call(torch.narrow, product.hidden, -1, begin, end - begin, view_of=product.hidden)
            found = self.call(torch.addmm, found, inputs, weight)
        assert found is not None
        return found

    def each(self) -> Iterator[tuple[int, int]]:
        """The rows of each part, at whose path new nodes are put. A part is read first, so that its block begins
        there."""
        path = self.edit.path
        owner, _, leaf = self.product.weight.rpartition(".")
        place = path if (owner, leaf) == (path, "weight") else ".".join(filter(None, (path, leaf)))
        for begin, end in pairwise(self.rows):
            self.edit.path = f"{place}[{begin}:{end}]"
            yield begin, end
        self.edit.path = path

    def read(self, name: str, begin: int, end: int) -> fx.Node:
        part = add_part(self.graph, name, self.parameters[name], begin, end)
        self.nodes.append(self.edit.parameter(part, self.graph.parts[part].tensor))
        return self.nodes[-1]

    def call(self, target: Any, *args: Any, view_of: fx.Node | None = None) -> fx.Node:
        self.nodes.append(self.edit.call(target, *args, view_of=view_of))
        return self.nodes[-1]
