"""Tables in parts: what reads a table reads its parts, one after the other.

An embedding looks each token up in the one part that has its row, to the bit as in the whole table. A cross entropy
with its head takes three numbers a token from each part (`functions.part_statistics`), and logits that are needed
otherwise are put side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...ir.program import RowPart
from ...runtime.functions import (
    chunked_cross_entropy,
    cross_entropy_of_parts,
    evaluation_logits,
    joined_statistics,
    part_statistics,
)
from ..dataflow import closure
from ..edit import GraphEdit, erase, erase_dead, set_outputs
from ..opgraph import OpGraph
from ..row_parts import add_part
from .tables import OF_PARTS, OF_SUM, Head, Lookup, TokenTable, loss_arguments


def split_table(graph: OpGraph, table: TokenTable, rows: Sequence[int]) -> None:
    """Make the parts of a table and of the biases of its heads, and let all that reads it read them."""
    parameters = graph.parameters()
    parts = {
        name: [add_part(graph, name, parameters[name], begin, end) for begin, end in pairwise(rows)]
        for name in (table.name, *table.biases)
    }
    for lookup in table.lookups:
        _Reader(graph, table, parts, lookup.node).look_up(lookup)
    for head in table.heads:
        reader = _Reader(graph, table, parts, head.node)
        if head.node.target is chunked_cross_entropy:
            reader.lose(head)
        elif head.node.target is evaluation_logits:
            drop_outputs(graph, head.node)
        else:
            reader.multiply(head)
    erase_dead(graph)


def drop_outputs(graph: OpGraph, logits: fx.Node) -> None:
    """Leave out the model's outputs that are made of these logits, with all that makes them."""
    below = closure([logits], lambda node: (user for user in node.users if user.op != "output"))
    set_outputs(graph, {name: node for name, node in graph.outputs.items() if node not in below})
    erase(graph, below)


class _Reader:
    """One node that reads a table, and what comes in its place."""

    def __init__(self, graph: OpGraph, table: TokenTable, parts: dict[str, list[str]], node: fx.Node):
        self.graph, self.table, self.parts, self.node = graph, table, parts, node
        self.edit = GraphEdit(graph, node)
        self.path = self.edit.path

    def each(self, bias: str = "") -> Any:
        """For each part, which is read first so that its block begins there: its rows, its weight and its bias."""
        for index, name in enumerate(self.parts[self.table.name]):
            part = self.graph.parts[name].part
            assert isinstance(part, RowPart)
            self.edit.path = f"{self.path}[{part.begin}:{part.end}]"
            weight = self.read(name)
            yield part, weight, self.read(self.parts[bias][index]) if bias else None
        self.edit.path = self.path

    def read(self, name: str) -> fx.Node:
        tensor = self.graph.parts[name].tensor
        return self.edit.parameter(name, tensor)

    def look_up(self, lookup: Lookup) -> None:
        """One lookup per part, each of the tokens of its rows; what other parts have found passes through."""
        found: fx.Node | None = None
        for part, weight, _ in self.each():
            index, is_here = self.local_index(lookup.ids, part)
            padding = lookup.padding_idx
            own = None if padding is None or not part.begin <= padding < part.end else padding - part.begin
            rows = self.edit.call(F.embedding, index, weight, own)
            if found is None:
                found = rows
            else:
                mask = self.edit.call(torch.unsqueeze, is_here, -1, view_of=is_here)
                found = self.edit.call(torch.where, mask, rows, found)
        assert found is not None
        self.edit.replace(self.node, found)

    def local_index(self, ids: fx.Node, part: RowPart) -> tuple[fx.Node, fx.Node]:
        """Each token's row in a part, 0 for tokens of other parts, and which tokens are of this one. Tokens of no part
        stay out of range in the first or the last one, which refuses them as the whole table does."""
        call = self.edit.call
        if part.begin == 0:
            is_here = call(torch.lt, ids, part.end)
            return call(torch.where, is_here, ids, 0), is_here
        is_here = call(torch.ge, ids, part.begin)
        if part.end < part.total:
            is_here = call(torch.logical_and, is_here, call(torch.lt, ids, part.end))
        return call(torch.where, is_here, call(torch.sub, ids, part.begin), 0), is_here

    def lose(self, head: Head) -> None:
        """The statistics of each part, joined to those of the parts before it, and the loss of all."""
        given = loss_arguments(self.node)
        options = {name: given[name] for name in OF_PARTS if name in given}
        found: fx.Node | None = None
        for part, weight, bias in self.each(head.bias):
            own = {**options, **self.own_weight(options.get("class_weight"), part)}
            operands = (head.hidden, weight, bias, given["labels"], part.begin, given["tokens"])
            made = self.edit.call(part_statistics, *operands, **own)
            found = made if found is None else self.edit.call(joined_statistics, found, made)
        kept = {name: given[name] for name in OF_SUM if name in given}
        name = self.node.name
        loss = self.edit.call(cross_entropy_of_parts, found, given["labels"], self.table.rows, **kept)
        self.edit.replace(self.node, loss)
        loss.name = name  # the loss keeps its name in programs

    def own_weight(self, class_weight: fx.Node | None, part: RowPart) -> dict[str, fx.Node]:
        """The weights of a part's classes."""
        if class_weight is None:
            return {}
        rows = slice(part.begin, part.end)
        return {"class_weight": self.edit.call(operator.getitem, class_weight, rows, view_of=class_weight)}

    def multiply(self, head: Head) -> None:
        """The logits of all parts side by side."""
        made = [self.edit.call(F.linear, head.hidden, weight, bias) for _, weight, bias in self.each(head.bias)]
        self.edit.replace(self.node, self.edit.call(torch.cat, made, -1))
