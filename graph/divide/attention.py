"""Calls of attention in an op graph, of whose operands members of a team may have parts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx

from ...runtime.functions import packed_attention, window_attention
from ..masks.calls import given_arguments

TOKENS = 2  # dimension of the operands of attention: (rows, heads, tokens, width)
IN_BLOCKS = (window_attention, packed_attention)


@dataclass(frozen=True)
class SharedAttention:
    """One call. `masks`: the tensors that say what queries see, for all tokens of a row."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    masks: tuple[fx.Node, ...]
    arguments: Mapping[str, Any]

    @property
    def is_causal(self) -> bool:
        return bool(self.arguments.get("is_causal"))


def attention_call(node: fx.Node) -> SharedAttention | None:
    """The attention that a node computes; None for another node."""
    if node.op != "call_function":
        return None
    if node.target is F.scaled_dot_product_attention:
        given = given_arguments(node.args, dict(node.kwargs))
        masks = [given.get("attn_mask")]
    elif node.target in IN_BLOCKS:
        given = dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)
        masks = [given.get("documents"), given.get("borders")]
    else:
        return None
    query, key, value = (given[name] for name in ("query", "key", "value"))
    return SharedAttention(query, key, value, tuple(m for m in masks if isinstance(m, fx.Node)), given)
