"""Calls of attention in an op graph, of whose operands members of a team may have parts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....runtime.functions import packed_attention, window_attention
from ..masks.drop_masks import ATTENTION, given_arguments

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
    if node.target in ATTENTION:
        given = given_arguments(node.args, dict(node.kwargs))
        masks = [given.get("attn_mask")]
    elif node.target in IN_BLOCKS:
        given = dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)
        masks = [given.get("documents"), given.get("borders")]
    else:
        return None
    query, key, value = (given[name] for name in ("query", "key", "value"))
    return SharedAttention(query, key, value, tuple(m for m in masks if isinstance(m, fx.Node)), given)


def unrepeated(node: fx.Node) -> tuple[fx.Node, int]:
    """Keys or values (rows, heads, tokens, width) before each head was repeated for several heads of queries, and how
    often; the node itself and 1 where they were not."""
    below = node
    if node.target in (torch.repeat_interleave, "repeat_interleave") and len(node.args) == 3 and node.args[2] == 1:
        source, repeats = node.args[:2]
        return (source, repeats) if isinstance(source, fx.Node) and isinstance(repeats, int) else (node, 1)
    for name in ("reshape", "expand"):
        if str(getattr(below.target, "__name__", below.target)) != name:
            return node, 1
        below = below.all_input_nodes[0]
    source = below.all_input_nodes[0] if below.all_input_nodes else node
    shapes = [tuple(n.meta["val"].shape) for n in (node, below, source)]
    if len(shapes[1]) != 5 or len(shapes[2]) != 4 or shapes[1] != (*shapes[2][:2], 1, *shapes[2][2:]):
        return node, 1
    heads, own = shapes[0][1], shapes[2][1]
    return (source, heads // own) if shapes[0] == (shapes[2][0], heads, *shapes[2][2:]) else (node, 1)
