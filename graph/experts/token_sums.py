"""Find where a layer of experts makes rows of tokens, and of a token's rows one value again.

In: a layer of experts, and the places of tokens (`follow/tokens.py`). Out: `TokenSums`, if the layer takes each of its
rows from a token by number, and if what is made of its results is, for each token, the sum over the same number of
rows, each times a number of its own: as modelling code of mixtures writes it, sorting tokens by expert and undoing
that. The facts prove that the numbers are those of a permutation, divided by the number of experts of a token, and that
it is undone. Rows that are rounded after they were taken are left alone: sums of their gradients have the tokens'
larger type.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ir.calls import call_name
from ..follow.linear import is_product
from ..follow.tokens import TokenFacts, TokenPlace
from ..operators.calls import copied_operand
from ..operators.record import Elements
from ..opgraph import OpGraph
from .layers import ExpertLayer, is_of_rows


@dataclass(frozen=True)
class TokenSums:
    """`tokens`: the value [tokens, ...] of which rows are taken, `taken`: the layer's rows, `results`: what it gives of
    them, `numbers`: the token of each row; `each`: the number of rows of a token. `chain`: the nodes that make sums of
    results, in order; the last one has the sums, [tokens, ...]. `shares`: what those of them that multiply results
    multiply by, [rows, 1] each; `in_order`: the node after which the rows of a token follow each other."""

    tokens: fx.Node
    taken: fx.Node
    results: fx.Node
    numbers: fx.Node
    each: int
    chain: tuple[fx.Node, ...]
    shares: dict[fx.Node, fx.Node]
    in_order: fx.Node

    @property
    def widens(self) -> bool:
        """Whether sums are made in a larger type than that of results, which they would be rounded to."""
        return any(node.meta["val"].dtype != self.results.meta["val"].dtype for node in self.chain)


def token_sums(graph: OpGraph, layer: ExpertLayer, facts: TokenFacts) -> TokenSums | None:
    """The way a layer's rows are made of tokens; None where it is not known to be as above."""
    taken = _token_source(graph, layer)
    if taken is None or layer.leaving != layer.products[-1:]:
        return None
    (rows, tokens, numbers), each = taken, rows_of_each(graph, layer)
    before, after = facts.place(tokens), facts.sorted_places.get(rows, ())
    if before is None or before.dim or after != (TokenPlace(0, before.inner * each),):
        return None
    found = _Chain(graph, layer, facts, TokenPlace(0, before.inner * each), each)
    if not found.is_whole or found.in_order is None:
        return None
    return TokenSums(tokens, rows, layer.leaving[0], numbers, each, tuple(found.nodes), found.shares, found.in_order)


def rows_of_each(graph: OpGraph, layer: ExpertLayer) -> int:
    """The number of rows of each token, by the size of the value of which a layer takes its rows; 1 where it takes them
    otherwise."""
    taken = _token_source(graph, layer)
    each, rest = divmod(layer.rows, int(taken[1].meta["val"].shape[0])) if taken else (1, 0)
    return 1 if rest else each


def _token_source(graph: OpGraph, layer: ExpertLayer) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The value of rows that enters a layer, if it is one, and the value and the numbers of which it is taken, without
    another rounding."""
    entering = [node for node in layer.entering if is_of_rows(node, layer.rows)]
    node = entering[0]
    while (before := copied_operand(graph, node, Elements.SAME)) is not None:
        node = before
    picked = _row_lookup(node) if len(entering) == 1 else None
    if picked is None or picked[0].meta["val"].dtype != entering[0].meta["val"].dtype:
        return None
    return entering[0], *picked


class _Chain:
    """The calls that make sums of a layer's results. `place`: of tokens in rows that are in order."""

    def __init__(self, graph: OpGraph, layer: ExpertLayer, facts: TokenFacts, place: TokenPlace, each: int):
        self.graph, self.facts, self.place, self.each, self.rows = graph, facts, place, each, layer.rows
        self.nodes: list[fx.Node] = []
        self.shares: dict[fx.Node, fx.Node] = {}
        self.in_order: fx.Node | None = None
        self.is_apart = self.is_whole = False
        node, outputs = layer.leaving[0], set(graph.outputs.values())
        while not self.is_whole and len(node.users) == 1 and node not in outputs:
            (user,) = node.users
            if user.meta["mutates"] or not self._takes(node, user):
                return
            self.nodes.append(user)
            node = user

    def _takes(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a call is the next one of the chain after `node`."""
        value, name, rest = user.meta["val"], call_name(user), node.meta["val"].shape[1:]
        factor = next((arg for arg in user.all_input_nodes if arg is not node), None)
        if factor is not None and is_product(self.graph, user, node, factor) and self.in_order is None:
            if tuple(factor.meta["val"].shape) != (self.rows, 1) or value.shape != node.meta["val"].shape:
                return False
            self.shares[user] = factor
            return True
        if not user.args or user.args[0] is not node:
            return False
        if name == "sum" and self.is_apart:
            shape = (self.rows // self.each, *node.meta["val"].shape[2:])
            self.is_whole = tuple(value.shape) == shape and _sums_second(user)
            return self.is_whole
        is_same = copied_operand(self.graph, user, Elements.SAME) is node
        is_reshaped = not is_same and copied_operand(self.graph, user, Elements.SAME, Elements.RESHAPED) is node
        if is_reshaped and self.in_order is not None and not self.is_apart:
            self.is_apart = tuple(value.shape) == (self.rows // self.each, self.each, *rest)
            return self.is_apart
        if _row_lookup(user) is not None and self.in_order is None and self.facts.places.get(user) == (self.place,):
            self.in_order = user
            return True
        return is_same


def _row_lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The value and the numbers of a call that takes rows of a value by number."""
    args = node.args
    if node.target is operator.getitem and isinstance(args[1], fx.Node):
        picked = args
    elif call_name(node) == "index_select" and len(args) == 3 and args[1] == 0:
        picked = (args[0], args[2])
    else:
        return None
    value, numbers = picked
    if not isinstance(value, fx.Node) or not isinstance(numbers, fx.Node):
        return None
    is_list = numbers.meta["val"].dim() == 1 and numbers.meta["val"].dtype != torch.bool
    return (value, numbers) if is_list and isinstance(value.meta["val"], torch.Tensor) else None


def _sums_second(node: fx.Node) -> bool:
    """Whether a sum is over dimension 1 alone, in the type of its operand."""
    given: dict[str, Any] = {**dict(zip(("dim", "keepdim"), node.args[1:], strict=False)), **node.kwargs}
    return given.pop("dim", None) in (1, [1], (1,)) and not any(given.values())
