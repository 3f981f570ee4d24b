"""Where a layer of experts makes rows of tokens, and of a token's rows one value again.

In: a layer of experts, and where tokens lie (`tokens/facts.py`). Out: `TokenSums`, if the layer takes each of its rows
from a token by number, and if what is made of its results is, for each token, the sum over as many rows, each times a
number of its own: as modelling code of mixtures writes it, sorting tokens by expert and undoing that. The facts prove
that the numbers are those of a permutation, divided by the number of experts of a token, and that it is undone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....ir.calls import call_name
from ..opgraph import OpGraph
from ..tokens.facts import TokenFacts, TokenPlace
from .layers import ExpertLayer, is_of_rows


@dataclass(frozen=True)
class TokenSums:
    """`tokens`: the value [tokens, ...] of which rows are taken, `taken`: the layer's rows, `numbers`: the token of
    each; `each`: the number of rows of a token. `shares`: what results are multiplied by, [rows, 1] each. `chain`: the
    nodes that make sums of results, in order; the last one has the sums, [tokens, ...]."""

    tokens: fx.Node
    taken: fx.Node
    numbers: fx.Node
    each: int
    shares: tuple[fx.Node, ...]
    chain: tuple[fx.Node, ...]


def token_sums(graph: OpGraph, layer: ExpertLayer, facts: TokenFacts) -> TokenSums | None:
    """How a layer's rows are made of tokens; None where it is not known to be as above."""
    taken = _taken(layer)
    if taken is None or layer.leaving != layer.products[-1:]:
        return None
    (rows, tokens, numbers), each = taken, rows_of_each(layer)
    before, after = facts.place(tokens), facts.sorted_places.get(rows, ())
    if before is None or before.dim or after != (TokenPlace(0, before.inner * each),):
        return None
    found = _chain(graph, layer, facts, TokenPlace(0, before.inner * each), each)
    return None if found is None else TokenSums(tokens, rows, numbers, each, *found)


def rows_of_each(layer: ExpertLayer) -> int:
    """The number of rows of each token, by the size of the value of which a layer takes its rows; 1 where it takes them
    otherwise."""
    taken = _taken(layer)
    each, rest = divmod(layer.rows, int(taken[1].meta["val"].shape[0])) if taken else (1, 0)
    return 1 if rest else each


def _taken(layer: ExpertLayer) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The value of rows that enters a layer, if it is one, and the value and the numbers of which it is taken, maybe in
    another type."""
    entering = [node for node in layer.entering if is_of_rows(node, layer.rows)]
    node = entering[0]
    while call_name(node) == "to" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    picked = _picked(node) if len(entering) == 1 else None
    return None if picked is None else (entering[0], *picked)


def _chain(
    graph: OpGraph, layer: ExpertLayer, facts: TokenFacts, place: TokenPlace, each: int
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """The factors of results, and the calls that make sums of them. `place`: of tokens in rows that are in order."""
    shares: list[fx.Node] = []
    chain: list[fx.Node] = []
    node, in_order, apart = layer.leaving[0], False, False
    rows, outputs = layer.rows, set(graph.outputs.values())
    while len(node.users) == 1 and node not in outputs:
        (user,) = node.users
        value, name = user.meta["val"], call_name(user)
        if user.meta["mutates"] or (user.args and user.args[0] is not node and name != "mul"):
            return None
        chain.append(user)
        if user.target in (operator.mul, torch.mul) and not in_order:
            factor = next((arg for arg in user.all_input_nodes if arg is not node), None)
            if factor is None or tuple(factor.meta["val"].shape) != (rows, 1):
                return None
            shares.append(factor)
        elif name == "sum" and apart:
            is_whole = tuple(value.shape) == (rows // each, *node.meta["val"].shape[2:])
            return (tuple(shares), tuple(chain)) if is_whole and _sums_second(user) else None
        elif name in ("view", "reshape", "unflatten") and in_order and not apart:
            apart = tuple(value.shape) == (rows // each, each, *node.meta["val"].shape[1:])
            if not apart:
                return None
        elif _picked(user) is not None and not in_order and facts.places.get(user) == (place,):
            in_order = True
        elif name != "to":
            return None
        node = user
    return None


def _picked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
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
