"""The vocabulary shared out among the members of a team: each has an equal number of a table's rows, and their biases.

In: a table of an op graph (`tables/tables.py`), and a graph in which all members have the same tokens. Out: what one
member computes. A lookup gives the member's own rows and zeros, which the team adds up; a cross entropy with its head
takes from each member's classes three numbers a token, which all members gather, so that no logits travel (Megatron-LM
3, the parallel cross entropy). A table that a head ties to an embedding is one part of each member for both.

Where members have different tokens (`OpGraph.apart`), a member looks up those of all, which it has of the batch, and
makes the numbers of its classes for the hidden states of all; each member then gets its own tokens' of both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...runtime.functions import (
    chunked_cross_entropy,
    cross_entropy_of_parts,
    evaluation_logits,
    joined_members,
    member_lookup,
    own_tokens,
    part_statistics,
    tokens_of_all,
)
from ..edit import GraphEdit
from ..loss.chunk_head import LossChunk, chunk_head, is_large, tokens_of_chunk
from ..opgraph import OpGraph
from ..tables.split_table import drop_outputs
from ..tables.tables import OF_PARTS, OF_SUM, Head, Lookup, TokenTable, find_tables, loss_arguments
from .exchanges import insert_exchange, is_exchange
from .member_experts import add_team_part
from .placements import Placement


def dividable_tables(graph: OpGraph, team: int) -> dict[str, TokenTable]:
    """The tables by name whose rows `team` members can have apart: all that reads them is lookups, and heads whose
    logits are for a cross entropy alone, without weights of its classes."""
    tables = find_tables(graph)
    return {name: table for name, table in tables.items() if not refusal(table, team, graph.apart)}


def refusal(table: TokenTable, team: int, apart: bool = False) -> str:
    """The reason why a table stays whole; empty where it can be divided."""
    if table.refusal:
        return table.refusal
    if table.rows % team:
        return f"it has {table.rows} rows, which {team} members cannot share evenly"
    for head in table.heads:
        weight = head.loss.class_weight if head.loss is not None else _loss_arguments(head).get("class_weight")
        if weight is not None:
            return "the loss has weights of its classes"
        if head.loss is None and head.node.target not in (chunked_cross_entropy, evaluation_logits):
            return f"{head.node.meta.get('source') or head.node.name} needs whole logits"
    read = [lookup.ids for lookup in table.lookups] + [n for n in map(_labels, table.heads) if n is not None]
    if apart and any(node.target is not own_tokens for node in read):
        return "members have other tokens of it than their own"
    return ""


def _labels(head: Head) -> fx.Node | None:
    """The labels of a head's loss; None in evaluation alone."""
    labels = head.loss.labels if head.loss is not None else _loss_arguments(head).get("labels")
    assert labels is None or isinstance(labels, fx.Node)
    return labels


def _tokens_of_all(edit: GraphEdit, own: fx.Node) -> fx.Node:
    """The tokens of all members, where each has its own."""
    value, _, *place = own.args
    return edit.call(tokens_of_all, value, *place)


def divide_table(graph: OpGraph, name: str, member: fx.Node, team: int, room_bytes: int) -> None:
    """Let a member compute its rows' share of a table. `member`: the input with its number; `room_bytes`: of a device,
    for logits in chunks."""
    for head in find_tables(graph)[name].heads:
        if head.loss is not None:
            chunk = head.loss.num_tokens
            if is_large(head.loss, team * room_bytes):
                chunk = min(chunk, team * tokens_of_chunk(head.loss, room_bytes))
            chunk_head(graph, head.loss, LossChunk(tokens=chunk, logits=False))
    table = find_tables(graph)[name]
    parameters = graph.parameters()
    parts = {whole: add_team_part(graph, whole, parameters[whole], 0, team) for whole in (name, *table.biases)}
    for lookup in table.lookups:
        _look_up(graph, lookup, parts[name], member, team)
    for head in table.heads:
        if head.node.target is evaluation_logits:
            drop_outputs(graph, head.node)
        else:
            _lose(graph, head, table, parts, member, team)


def _loss_arguments(head: Head) -> dict[str, Any]:
    return loss_arguments(head.node) if head.node.target is chunked_cross_entropy else {}


def _read(edit: GraphEdit, part: str) -> fx.Node:
    tensor = edit.graph.parts[part].tensor
    return edit.parameter(part, tensor)


def _look_up(graph: OpGraph, lookup: Lookup, part: str, member: fx.Node, team: int) -> None:
    edit = GraphEdit(graph, lookup.node)
    padding = () if lookup.padding_idx is None else (lookup.padding_idx,)
    ids = _tokens_of_all(edit, lookup.ids) if graph.apart else lookup.ids
    found = edit.call(member_lookup, ids, _read(edit, part), member, team, *padding)
    needed, dims = (Placement.PART, (0,)) if graph.apart else (Placement.WHOLE, ())
    whole = insert_exchange(edit, found, Placement.SUMMAND, needed, team, *dims)
    is_exchanged = any(map(is_exchange, lookup.node.users))
    edit.replace(lookup.node, edit.call(torch.clone, whole) if is_exchanged else whole)


def _lose(graph: OpGraph, head: Head, table: TokenTable, parts: dict[str, str], member: fx.Node, team: int) -> None:
    edit, given = GraphEdit(graph, head.node), _loss_arguments(head)
    hidden, labels = head.hidden, given["labels"]
    if graph.apart:
        hidden = insert_exchange(edit, hidden, Placement.PART, Placement.SHARED, team, 0)
        labels = _tokens_of_all(edit, labels)
    elif hidden.meta["val"].requires_grad:  # else it has no gradient to add up
        hidden = insert_exchange(edit, hidden, Placement.WHOLE, Placement.SHARED, team)
    weight, bias = _read(edit, parts[table.name]), _read(edit, parts[head.bias]) if head.bias else None
    begin = edit.call(operator.mul, member, table.rows // team)
    options = {name: given[name] for name in OF_PARTS if name in given}
    own = edit.call(part_statistics, hidden, weight, bias, labels, begin, given["tokens"], **options)
    needed, dims = (Placement.PART, (1, 0)) if graph.apart else (Placement.WHOLE, (0,))
    joined = edit.call(joined_members, insert_exchange(edit, own, Placement.PART, needed, team, *dims))
    kept = {name: given[name] for name in OF_SUM if name in given}
    name = head.node.name
    loss = edit.call(cross_entropy_of_parts, joined, given["labels"], table.rows, **kept)
    edit.replace(head.node, loss)
    loss.name = name  # the loss keeps its name in programs
