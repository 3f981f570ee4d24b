"""Experts shared out among the members of a team that have different tokens: each token goes to its experts and back.

In: a layer of experts in an op graph of one member's tokens, which computes with all experts. Out: what one member
computes with its own experts. The members tell each other to which experts their tokens go, and then each token goes to
the members that have its experts, once to each, and one row comes back from each: an all-to-all by count (GShard,
Lepikhin 2020, 3.2, without its capacity: no token is dropped). A member multiplies its rows by the router's weights
before the last product, which is linear, and adds up its rows of a token; where the token is, those of all members are
added up. Where the model weighs and adds up results in a larger type than theirs, they come back one by one, and are
weighed and added up where the token is, so that none of them is rounded once more.

If it is not known how the layer makes rows of tokens (`experts/token_sums.py`), each row goes to its expert as a token
of its own.

How many rows arrive is known only while it runs. Tensors have room for the most, the rows of all tokens of all members,
so that shapes in stages do not depend on the routing; products end after the rows that came, and zeros follow them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from ...runtime.experts.routes import (
    arrived_offsets,
    arrived_shares,
    row_numbers,
    rows_of_tokens,
    token_experts,
    token_shares,
    tokens_to_send,
    weighted,
)
from ..dataflow import Dataflow
from ..edit import GraphEdit, erase_dead
from ..experts.layers import ExpertLayer, is_of_rows
from ..experts.share import ExpertShare, replace_layers
from ..experts.token_sums import TokenSums, token_sums
from ..follow.tokens import TokenFacts
from ..opgraph import OpGraph
from .exchanges import from_experts, insert_exchange, to_experts
from .local import LocalValues
from .member_experts import add_team_part
from .placements import Placement


def refusal(layer: ExpertLayer, team: int) -> str:
    """The reason why a layer's experts stay with every member; empty where they can be divided."""
    if layer.refusal:
        return layer.refusal
    if layer.experts % team:
        near = [n for n in range(2, layer.experts + 1) if layer.experts % n == 0]
        return f"it has {layer.experts} experts, which {team} members cannot share evenly; teams that can: {near}"
    shared = next((node for node in layer.entering if not is_of_rows(node, layer.rows)), None)
    if shared is not None and shared.meta["val"].requires_grad:
        return f"{shared.name} ({shared.meta.get('source', '')}) meets rows of all tokens inside it"
    return ""


def route_experts(
    graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int, values: LocalValues, facts: TokenFacts
) -> None:
    """Let a member compute its own experts' share of a layer, for the tokens of all. `member`: the input with its
    number; `facts`: the places of tokens."""
    sums, before = token_sums(graph, layer, facts), GraphEdit(graph, layer.products[0])
    combines = sums is not None and not sums.widens and _move_before(graph, [*sums.shares.values()], layer)
    if sums is None:
        taken, each = {node: node for node in layer.entering if is_of_rows(node, layer.rows)}, 1
        rows = before.call(row_numbers, next(iter(taken)))
    else:
        taken, each = {sums.taken: sums.tokens}, sums.each
        rows = before.call(rows_of_tokens, sums.numbers)
    given = {n: before.call(tokens_to_send, value) for n, value in taken.items()}
    own_routes = before.call(token_experts, layer.offsets, rows, each)
    routes = back = insert_exchange(before, own_routes, Placement.PART, Placement.WHOLE, team, 0)
    if sums is not None and not combines:
        each_row = before.call(torch.reshape, own_routes, (-1, 1))
        back = insert_exchange(before, each_row, Placement.PART, Placement.WHOLE, team, 0)
    sent = {n: before.call(to_experts, value, team, routes, layer.experts) for n, value in given.items()}
    shares = None
    if sums is not None and sums.shares and combines:
        whole = reduce(partial(before.call, operator.mul), sums.shares.values())
        shares = before.call(token_shares, whole, rows, each)
        shares = before.call(to_experts, shares, team, routes, layer.experts)
    share = _Routed(graph, layer, member, team, routes, sent, shares, values)
    found = {n: share.call(from_experts, r, team, back, layer.experts) for n, r in share.compute().items()}
    if sums is None:
        replace_layers(graph, [(layer, found)])
    elif combines:
        _replace_chain(graph, layer, sums, sums.chain[-1], found[sums.results])
    else:
        _replace_chain(graph, layer, sums, sums.in_order, _apply_chain(graph, sums, rows, found[sums.results]))


def _apply_chain(graph: OpGraph, sums: TokenSums, rows: fx.Node, results: fx.Node) -> fx.Node:
    """Copy the chain of a layer onto results that are in the order of tokens already. `rows`: those of each."""
    edit = GraphEdit(graph, sums.in_order)
    for node in sums.chain[: sums.chain.index(sums.in_order)]:
        if node in sums.shares:
            shares = edit.call(torch.reshape, edit.call(token_shares, sums.shares[node], rows, sums.each), (-1, 1))
            results = edit.call(operator.mul, results, shares)
        else:
            results = edit.call(torch.Tensor.to, results, node.meta["val"].dtype)
    return results


def _move_before(graph: OpGraph, wanted: Sequence[fx.Node], layer: ExpertLayer) -> bool:
    """Move what some values are made of before a layer, where none of it depends on the layer; whether it is so."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first, moved = layer.products[0], set[fx.Node]()
    stack = [node for node in wanted if order[node] > order[first]]
    while stack:
        node = stack.pop()
        if node in layer.inside or node.meta["mutates"] or node.meta.get("random"):
            return False
        moved.add(node)
        stack += (n for n in node.all_input_nodes if order[n] > order[first] and n not in moved)
    for node in sorted(moved, key=order.__getitem__):
        first.prepend(node)
    return True


def _replace_chain(graph: OpGraph, layer: ExpertLayer, sums: TokenSums, last: fx.Node, result: fx.Node) -> None:
    """Let what reads `last`, which is of the chain that makes sums of a layer's rows, read `result`, and remove what
    made it and nothing else reads."""
    chain = sums.chain[: sums.chain.index(last) + 1]
    made_of = Dataflow(graph.nodes).ancestors([*chain, sums.taken])
    replace_layers(graph, [(replace(layer, inside=(*layer.inside, *chain)), {last: result})])
    erase_dead(graph, [node for node in graph.nodes if node not in made_of or node.op == "get_attr"])


class _Routed(ExpertShare):
    """The experts of one member of a team, with the rows of the tokens that come to them. `shares`: what came with them
    of the router's weights."""

    def __init__(
        self, graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int, routes: fx.Node,
        sent: dict[fx.Node, fx.Node], shares: fx.Node | None, values: LocalValues,
    ):  # fmt: skip
        super().__init__(graph, layer, f"{layer.name}[/{team}]")
        self.team, self.sent, self.values = team, sent, values
        where = (routes, member, team, layer.experts)
        self.offsets = self.call(arrived_offsets, *where)  # first: the block begins here
        self.shares = None if shares is None else self.call(arrived_shares, shares, *where)

    def parameter(self, whole: str) -> str:
        return add_team_part(self.graph, whole, self.layer.weights[whole], 0, self.team)

    def own_offsets(self) -> fx.Node:
        return self.offsets

    def own_rows(self, rows: fx.Node) -> fx.Node:
        return self.sent[rows]

    def product_rows(self, product: fx.Node, rows: Any) -> Any:
        is_last = product is self.layer.products[-1] and self.shares is not None
        return self.call(weighted, rows, self.shares) if is_last else rows

    def _copy_node(self, node: fx.Node) -> fx.Node:
        copy = super()._copy_node(node)
        self.values.set(copy)
        return copy
