"""`split-vocabulary`: tables that are too large for a device become parts, each with some of the rows.

In: the op graph. Out: a graph in which each part is a parameter of its own and, with what reads it, a block of its own,
so that a partitioner may put each into another stage. `parts.py` says how parts compute what the table did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...graph.edit import copy_graph
from ...graph.loss.chunk_head import LossChunk, chunk_head, workspace_bytes
from ...graph.opgraph import OpGraph, value_tensors
from ...graph.row_parts import even_boundaries, held_bytes, wrong_boundaries
from ...graph.tables.split_table import split_table
from ...graph.tables.tables import TokenTable, find_tables
from ...ir.errors import PassError
from ...ir.units import format_bytes
from ..decisions import Decision
from ..draft import Draft
from .rows_in_parts import COPIES, SHARE, RowBoundaries, RowsInParts, device_room, refused_by_optimizer


@dataclass(frozen=True)
class SplitVocabulary(RowsInParts):
    """`parts`: of each table, or automatic: tables that take more than half of a device, into parts that do not."""

    name: ClassVar[str] = "split-vocabulary"
    rank: ClassVar[int] = 11
    # split table -> 0, the first row of each further part, the number of rows
    decides: ClassVar[tuple[Decision, ...]] = (Decision("vocabulary", RowBoundaries, {}),)

    def lacks(self, draft: Draft) -> str:
        return _refusal_of_team(draft.graph) or "this model looks no table up"

    def look(self, draft: Draft) -> tuple[RowBoundaries, list[str]]:
        """The tables to split, and the reasons why other large tables cannot be split."""
        found: RowBoundaries = {}
        refused = []
        for table in draft.graph.once(find_tables).values():
            count = self.parts or num_parts(draft.graph, table, device_room(draft))
            refusal = table.refusal or refused_by_optimizer(draft, table.name, table.value)
            if count > 1 and (refusal or count > table.rows):
                refused.append(f"{table.name} stays whole: {refusal or f'it has {table.rows} rows only'}")
            elif count > 1:
                found[table.name] = even_boundaries(table.rows, count)
        return found, refused

    def rewrite(self, draft: Draft, decision: RowBoundaries) -> None:
        if not decision:
            return
        tables = draft.graph.once(find_tables)
        for name, rows in decision.items():
            _check(draft, tables, name, rows)
        graph = copy_graph(draft.graph)
        lost = set(draft.graph.outputs)
        tables = find_tables(graph)
        if _chunk_heads(graph, [tables[name] for name in decision]):
            tables = find_tables(graph)
        for name, rows in decision.items():
            split_table(graph, tables[name], rows)
        graph.rebuild()
        draft.graph = graph
        lost -= set(draft.graph.outputs)
        told = [f"{name} is {len(rows) - 1} parts" for name, rows in decision.items()]
        told += [f"evaluation gives no {', '.join(sorted(lost))}, which would exist whole"] if lost else []
        self.tell(draft, told)


def num_parts(graph: OpGraph, table: TokenTable, room_bytes: int) -> int:
    """The number of parts of which each takes at most its share of a device, with the values that it makes."""
    divided = table.bytes * (COPIES if table.value.requires_grad else 1)
    if table.value.requires_grad and graph.gradient_dtype(table.value) != table.dtype:  # sums are wider than gradients
        divided = held_bytes(graph, [table.value])
    divided += sum(workspace_bytes(head.loss, head.loss.num_tokens) for head in table.heads if head.loss is not None)
    read = [lookup.node for lookup in table.lookups] + [head.hidden for head in table.heads]
    whole = max(2 * sum(t.nbytes for t in value_tensors(node.meta["val"])) for node in read)
    share = SHARE * room_bytes
    return math.ceil(divided / max(share - whole, share / 2))


def _refusal_of_team(graph: OpGraph) -> str:
    """The way out for tables that members of a team have divided before; empty without a team."""
    if graph.team == 1:
        return ""
    return (
        f"split-width, which comes before it, has divided tables among {graph.team} members; leave split-vocabulary "
        "out, or take the tables that are to be in parts out of the plan's decision `width`"
    )


def _check(draft: Draft, tables: dict[str, TokenTable], name: str, rows: Sequence[int]) -> None:
    """Raise `PassError` for a decision, perhaps edited, that is none about this model."""
    if name not in tables:
        known = _refusal_of_team(draft.graph) or f"there are {', '.join(tables) or 'none'}"
        raise PassError(f"split-vocabulary: {name!r} is no table of this model; {known}")
    table = tables[name]
    wrong = wrong_boundaries(rows, table.rows)
    if wrong:
        raise PassError(f"split-vocabulary: the parts of {name} begin at rows {list(rows)}; {wrong}")
    refusal = table.refusal or refused_by_optimizer(draft, table.name, table.value)
    if refusal:
        raise PassError(f"split-vocabulary: {name} ({format_bytes(table.bytes)}) cannot be split: {refusal}")


def _chunk_heads(graph: OpGraph, tables: Sequence[TokenTable]) -> bool:
    """Let one call make the logits and the loss of each head that is to be in parts, all tokens at once. Returns
    whether there is such a head."""
    losses = [head.loss for table in tables for head in table.heads if head.loss is not None]
    for loss in losses:
        chunk_head(graph, loss, LossChunk(tokens=loss.num_tokens, logits=False))
    return bool(losses)
