"""Calls of attention: their arguments, and what the results of their scores are used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...ir.calls import call_name
from ..operators.calls import copied_operand, operators
from ..operators.record import Elements, operator_name
from ..opgraph import OpGraph
from .forms import KeyWindow, MaskForm
from .intervals import Intervals

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def given_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(ARGUMENTS, args)), **kwargs}


def window_of(seen: Intervals, num_queries: int, num_keys: int) -> tuple[int | None, int | None] | None:
    """The numbers of keys before and after its own place that each query sees, None for all; None where they differ
    from query to query, row to row or head to head, or a query does not see its own place."""
    rows = seen.begin.reshape(-1, seen.begin.shape[-1])
    begin, end = rows[0], seen.end.reshape(rows.shape)[0]
    if not bool((rows == begin).all() and (seen.end.reshape(rows.shape) == end).all()):
        return None
    if seen.num_keys == 1:  # it says the same of all keys
        end = end * num_keys
    begin, end, place = begin.expand(num_queries), end.expand(num_queries), torch.arange(num_queries)
    before = (place - begin)[begin > 0][:1].tolist()
    after = (end - 1 - place)[end < num_keys][:1].tolist()
    if min([*before, *after, 0]) < 0:
        return None
    first = (place - before[0]).clamp(min=0) if before else torch.zeros_like(place)
    last = (place + after[0] + 1).clamp(max=num_keys) if after else torch.full_like(place, num_keys)
    if not (torch.equal(begin, first) and torch.equal(end, last) and bool((first < last).all())):
        return None
    return before[0] if before else None, after[0] if after else None


def form_of(seen: Intervals | None, num_queries: int, num_keys: int) -> MaskForm | None:
    """The form of a mask that is the same for all rows of the batch and all heads."""
    window = None if seen is None else window_of(seen, num_queries, num_keys)
    if window is None:
        return None
    before, after = window
    if before is None:
        return "all" if after is None else "causal" if after == 0 else None
    return None if after is None else KeyWindow(before=before, after=after)


def batched_product(graph: OpGraph, node: fx.Node) -> str:
    """The operator by which a node multiplies matrices in batches; "" where it does not."""
    names = map(operator_name, operators(graph, node) or ())
    return next((name for name in names if name in ("bmm", "baddbmm")), "")


def weighs(graph: OpGraph, node: fx.Node) -> bool:
    """Whether a batched product reads a value, or what casts and dropout make of it."""

    def keeps(user: fx.Node) -> bool:
        return call_name(user) == "dropout" or copied_operand(graph, user, Elements.SAME) is node

    return any(batched_product(graph, user) or (keeps(user) and weighs(graph, user)) for user in node.users)


def is_scored(graph: OpGraph, node: fx.Node) -> bool:
    """Whether a value comes from a batched product by way of calls that keep its shape: scales, masks, biases."""
    shape = node.meta["val"].shape
    before = [n for n in node.all_input_nodes if getattr(n.meta.get("val"), "shape", None) == shape]
    return any(batched_product(graph, n) or is_scored(graph, n) for n in before)
