"""`split-vocabulary`: tables that are too large for a device become parts, each with some of the rows.

In: the op graph. Out: a graph in which each part is a parameter of its own and, with what reads it, a block of its own,
so that a partitioner may put each into another stage. An embedding looks each token up in the one part that has its
row, to the bit as in the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...ir.errors import PassError
from ...ir.program import RowPart
from ...ir.units import format_bytes
from ..draft import Draft
from .edit import GraphEdit
from .graph_pass import GraphPass
from .opgraph import OpGraph, PartParam, value_tensors
from .tables import Lookup, TokenTable, find_tables

COPIES = 3  # of a trained table at once: the weights, their gradient, and the gradient that is added to it
SHARE = 0.5  # of a device's memory that a table takes at most, so that another stage has room beside it

Boundaries = dict[str, list[int]]  # table -> 0, the first row of each further part, the number of rows


@dataclass(frozen=True)
class SplitVocabulary(GraphPass):
    """`parts`: of each table, or automatic: tables that take more than half of a device, into parts that do not."""

    name: ClassVar[str] = "split-vocabulary"
    decides: ClassVar[str] = "vocabulary"
    automatic: ClassVar[tuple[str, ...]] = ("parts",)
    parts: int = 0

    def plan(self, draft: Draft) -> Boundaries:
        """Raises `PassError` where `parts` is given and no table can have so many."""
        found: Boundaries = {}
        refused = []
        for table in find_tables(draft.graph).values():
            count = self.parts or parts_needed(table, _room(draft))
            refusal = table.refusal or refused_by_optimizer(draft, table)
            if count > 1 and (refusal or count > table.rows):
                refused.append(f"{table.name} stays whole: {refusal or f'it has {table.rows} rows only'}")
            elif count > 1:
                found[table.name] = even_boundaries(table.rows, count)
        if refused:
            draft.notes[self.name] = "; ".join(refused)
        if self.parts > 1 and not found:
            raise PassError(f"split-vocabulary: {'; '.join(refused) or 'this model looks no table up'}")
        return found

    def rewrite(self, draft: Draft, decision: Boundaries) -> None:
        if not decision:
            return
        graph = draft.graph.copy()
        tables = find_tables(graph)
        for name, rows in decision.items():
            _check(draft, tables, name, rows)
        for name, rows in decision.items():
            split_table(graph, tables[name], rows)
        graph.rebuild()
        draft.graph = graph


def _room(draft: Draft) -> int:
    """The bytes of the smallest device."""
    return min(device.budget_bytes for device in draft.machine.devices)


def parts_needed(table: TokenTable, room_bytes: int) -> int:
    """The number of parts of which each takes at most its share of a device, with the values that it makes."""
    weights = table.bytes * (COPIES if table.value.requires_grad else 1)
    values = max(2 * sum(t.nbytes for t in value_tensors(node.meta["val"])) for node in table.nodes)
    share = SHARE * room_bytes
    return math.ceil(weights / max(share - values, share / 2))


def even_boundaries(rows: int, count: int) -> list[int]:
    """Parts of as equal size as may be."""
    return [rows * i // count for i in range(count + 1)]


def refused_by_optimizer(draft: Draft, table: TokenTable) -> str:
    """Why the optimizer needs the whole table; empty where it does not."""
    whole = draft.options.takes_whole
    if whole is None or not table.value.requires_grad or not whole(table.name):
        return ""
    return "its optimizer looks at whole parameters, not at each element; torch.optim.AdamW would do"


def _check(draft: Draft, tables: dict[str, TokenTable], name: str, rows: Sequence[int]) -> None:
    """Raise `PassError` for a decision, perhaps edited, that is none about this model."""
    if name not in tables:
        raise PassError(
            f"split-vocabulary: {name!r} is no table of this model; there are {', '.join(tables) or 'none'}"
        )
    table = tables[name]
    ends = [0, table.rows]
    if len(rows) < 3 or [rows[0], rows[-1]] != ends or any(a >= b for a, b in pairwise(rows)):
        raise PassError(
            f"split-vocabulary: the parts of {name} begin at rows {list(rows)}; the first must begin at 0, each "
            f"further one at a later row, and {table.rows} must end the list, so that no parts overlap or leave a gap"
        )
    refusal = table.refusal or refused_by_optimizer(draft, table)
    if refusal:
        raise PassError(f"split-vocabulary: {name} ({format_bytes(table.bytes)}) cannot be split: {refusal}")


def split_table(graph: OpGraph, table: TokenTable, rows: Sequence[int]) -> None:
    """Make the parts of a table, and let all that reads it read them."""
    parts = []
    owner, _, leaf = table.name.rpartition(".")
    for begin, end in pairwise(rows):
        name = f"{owner}[{begin}:{end}].{leaf}"
        tensor = nn.Parameter(table.value.detach()[begin:end], requires_grad=table.value.requires_grad)
        graph.parts[name] = PartParam(RowPart(table.name, begin, end, table.rows), tensor)
        if table.name in graph.hooks:
            graph.hooks[name] = graph.hooks[table.name]
        parts.append(name)
    for lookup in table.lookups:
        _split_lookup(graph, lookup, parts, table.dtype)


def _split_lookup(graph: OpGraph, lookup: Lookup, names: Sequence[str], dtype: torch.dtype) -> None:
    """One lookup per part, each of the tokens of its rows; what other parts have found passes through."""
    edit = GraphEdit(graph, lookup.node)
    found: fx.Node | None = None
    for name in names:
        row = graph.parts[name]
        edit.path = f"{lookup.node.meta['module_path']}[{row.part.begin}:{row.part.end}]"
        weight = edit.parameter(name, row.tensor, dtype)
        index, is_here = _local_index(edit, lookup.ids, row.part)
        padding = lookup.padding_idx
        padding = (
            padding - row.part.begin
            if padding is not None and padding in range(*row.part.rows.indices(row.part.total))
            else None
        )
        rows = edit.call(F.embedding, index, weight, padding)
        if found is None:
            found = rows
        else:
            mask = edit.call(torch.unsqueeze, is_here, -1, view_of=is_here)
            found = edit.call(torch.where, mask, rows, found)
    assert found is not None
    edit.replace(lookup.node, found)


def _local_index(edit: GraphEdit, ids: fx.Node, part: RowPart) -> tuple[fx.Node, fx.Node]:
    """Each token's row in a part, 0 for tokens of other parts, and which tokens are of this one. Tokens of no part stay
    out of range in the first or the last one, which refuses them as the whole table does."""
    if part.begin == 0:
        is_here = edit.call(torch.lt, ids, part.end)
        return edit.call(torch.where, is_here, ids, 0), is_here
    is_here = edit.call(torch.ge, ids, part.begin)
    if part.end < part.total:
        is_here = edit.call(torch.logical_and, is_here, edit.call(torch.lt, ids, part.end))
    return edit.call(torch.where, is_here, edit.call(torch.sub, ids, part.begin), 0), is_here
