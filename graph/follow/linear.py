"""The linearity of nodes, asked of the operators' rules for sums over rows, and the summands of a loss.

A sum over all rows passes what is linear in it, as a sum with the same scale, and nothing else. So an operand that is
taken for such a sum tells whether the result is linear in it; one with rows tells whether these are added or averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..operators.calls import alike
from ..operators.states import ByRow, Kind, OverRows, RowState, Scale
from ..opgraph import OpGraph, value_tensors
from .engine import Effect, Follower

REDUCTIONS = {0: "mean", 1: "sum"}  # by the power of the number of rows in what they make of rows


def is_scalar(node: Any) -> bool:
    """Whether the node's value is a tensor of one element."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.numel() == 1


def effect_of(graph: OpGraph, node: fx.Node, given: Mapping[fx.Node, RowState], rows: int = 2) -> Effect:
    """The effect of a node whose operands have these states, and whose other values are constants."""

    def find() -> Effect:
        follower = Follower(graph, rows, None)
        for operand, state in given.items():
            follower.states |= {id(tensor): state for tensor in value_tensors(operand.meta["val"])}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            follower.node(node)
        states = tuple(follower.state(tensor) for tensor in value_tensors(node.meta["val"]))
        return Effect(states, tuple(follower.found.get(node, ())), ())

    about: Hashable = (effect_of, rows, *((node.all_input_nodes.index(n), state) for n, state in given.items()))
    return alike(graph, node, about, find)


def is_linear(graph: OpGraph, node: fx.Node, operands: Collection[fx.Node], offset: bool = False) -> bool:
    """Whether a node's only tensor is linear in these operands together, with all others as they are; with an `offset`,
    whether it is such a value plus one that does not depend on them."""
    if node.op not in ("call_function", "call_method", "call_module") or not operands:
        return False
    total = OverRows(scale=Scale(0 if offset else 1))
    value = node.meta["val"]
    tensors = [tensor for operand in operands for tensor in value_tensors(operand.meta["val"])]
    if not isinstance(value, torch.Tensor) or not all(torch.can_cast(t.dtype, value.dtype) for t in tensors):
        return False  # numbers are rounded to whole ones
    effect = effect_of(graph, node, dict.fromkeys(operands, total))
    return not effect.met and isinstance(effect.states[0], OverRows)


def is_product(graph: OpGraph, node: fx.Node, *factors: fx.Node) -> bool:
    """Whether a node's value is linear in each of these operands."""
    return all(is_linear(graph, node, (factor,)) for factor in factors)


def is_quotient(graph: OpGraph, node: fx.Node) -> bool:
    """Whether a node divides its first argument by its second."""
    above, below = (*node.args, None, None)[:2]
    if not isinstance(above, fx.Node) or not isinstance(below, fx.Node) or above is below:
        return False
    effect = effect_of(graph, node, dict.fromkeys((above, below), OverRows()))
    return any(kind is Kind.RATIO for kind, _ in effect.met)


def reduction_of(graph: OpGraph, node: fx.Node) -> str:
    """ "sum" or "mean" if the node reduces tensors over all of their dimensions so, else ""."""
    shapes = {n: n.meta["val"].shape for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)}
    largest = max(shapes.values(), key=lambda shape: shape.numel(), default=torch.Size())
    if not is_scalar(node) or not largest:
        return ""
    given = {n: ByRow(dim=0) for n, shape in shapes.items() if shape == largest}
    effect = effect_of(graph, node, given, largest[0])
    is_total = not effect.met and isinstance(effect.states[0], OverRows)
    return REDUCTIONS.get(effect.states[0].scale.power, "") if is_total else ""


@dataclass
class LinearPath:
    """The nodes through which the loss depends linearly on its terms, and the terms' nodes in order."""

    inside: set[fx.Node] = field(default_factory=set)
    terms: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def to(graph: OpGraph, node: fx.Node, depends: Callable[[Any], bool]) -> LinearPath:
        """The path that ends in `node`. `depends` says whether a factor depends on the batch."""
        path = LinearPath()
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current in path.inside or current in path.terms:
                continue
            before = _summands(graph, current, depends)
            if before:
                path.inside.update((current, *(n for n in current.all_input_nodes if not is_scalar(n))))
                waiting += reversed(before)
            else:
                path.terms.append(current)
        return path


def _summands(graph: OpGraph, node: fx.Node, depends: Callable[[Any], bool]) -> list[fx.Node]:
    """The scalars in which a scalar of the path is linear, directly or put together in one tensor, without those that
    do not depend on the batch; none for a node that is a term."""
    found: list[fx.Node] = []
    before = [n for n in node.all_input_nodes if depends(n)]
    for operand in before:
        parts = [operand] if is_scalar(operand) else [n for n in operand.all_input_nodes if depends(n)]
        is_apart = parts != [operand]
        if is_apart and not (all(map(is_scalar, parts)) and is_linear(graph, operand, parts, offset=True)):
            return []
        found += parts
    is_reduced = any(map(is_scalar, before)) and reduction_of(graph, node)  # of one row: more rows are no scalar
    return found if is_scalar(node) and not is_reduced and is_linear(graph, node, before, offset=True) else []
