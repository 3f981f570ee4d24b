"""Calls of attention: their arguments, and what the results of their scores are used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...ir.calls import call_name
from .forms import KeyWindow, MaskForm
from .intervals import Intervals

PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "__matmul__"))
_KEEP = frozenset(("dropout", "to", "type", "float", "type_as", "half", "bfloat16"))
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def given_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(ARGUMENTS, args)), **kwargs}


def form_of(seen: Intervals, num_queries: int, num_keys: int) -> MaskForm | None:
    """The form of a mask that is the same for all rows of the batch and all heads."""
    rows = seen.begin.reshape(-1, seen.begin.shape[-1])
    begin, end = rows[0], seen.end.reshape(rows.shape)[0]
    if not bool((rows == begin).all() and (seen.end.reshape(rows.shape) == end).all()):
        return None
    if seen.num_keys == 1:  # it says the same of all keys
        end = end * num_keys
    begin, end, place = begin.expand(num_queries), end.expand(num_queries), torch.arange(num_queries)
    starts_at_once = bool((begin == 0).all())
    if starts_at_once and bool((end == num_keys).all()):
        return "all"
    if starts_at_once and torch.equal(end, (place + 1).clamp(max=num_keys)):
        return "causal"
    before, after = (place - begin)[begin > 0], (end - 1 - place)[end < num_keys]
    if not len(before) or not len(after) or int(before[0]) < 0 or int(after[0]) < 0:
        return None
    window = KeyWindow(before=int(before[0]), after=int(after[0]))
    first, last = (place - window.before).clamp(min=0), (place + window.after + 1).clamp(max=num_keys)
    is_window = torch.equal(begin, first) and torch.equal(end, last) and bool((first < last).all())
    return window if is_window else None


def weighs(node: fx.Node) -> bool:
    """Whether a batched product reads a value, or what casts and dropout make of it."""
    kept = [user for user in node.users if call_name(user) in _KEEP]
    return any(call_name(user) in PRODUCTS for user in node.users) or any(map(weighs, kept))


def is_scored(node: fx.Node) -> bool:
    """Whether a value comes from a batched product by way of calls that keep its shape: scales, masks, biases."""
    shape = node.meta["val"].shape
    before = [n for n in node.all_input_nodes if getattr(n.meta.get("val"), "shape", None) == shape]
    return any(call_name(n) in PRODUCTS or is_scored(n) for n in before)
