"""Attention whose heads of keys and values each serve several heads of queries, without a copy for each of these.

In: a call of attention without a mask, whose keys and values were repeated for the queries' heads. Out: the call on
what was repeated, with `enable_gqa`: CPUs and flash attention know groups of heads, so that the repeated ones need not
be made, nor kept for backward. Kernels for fp32 on GPUs do not, and keep the copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..edit import change_arguments
from ..kernels.attention import FLASH, cuda_backend
from ..opgraph import OpGraph


def heads_before_repeat(node: fx.Node) -> tuple[fx.Node, int]:
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


def drop_repeats(graph: OpGraph, node: fx.Node, on_gpu: bool) -> bool:
    """Let a call of `scaled_dot_product_attention` without a mask read keys and values as they were before they were
    repeated, if its kernel takes them so. Returns whether it does now."""
    given: dict[str, Any] = {**dict(zip(("query", "key", "value"), node.args)), **node.kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if not all(isinstance(operand, fx.Node) for operand in (query, key, value)) or given.get("enable_gqa"):
        return False
    found = [heads_before_repeat(operand) for operand in (key, value)]
    if found[0][1] == 1 or found[0][1] != found[1][1] or query.meta["val"].dim() != 4:
        return False
    if on_gpu:
        tensors = [n.meta["val"] for n in (query, found[0][0], found[1][0])]
        tensors = tensors if graph.autocast is None else [t.to(graph.autocast) for t in tensors]
        if cuda_backend(tensors[0], tensors[1], tensors[2], None, bool(given.get("is_causal"))) != FLASH:
            return False
    before = {key: found[0][0], value: found[1][0]}

    def new_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = fx.map_arg((args, dict(kwargs)), lambda n: before.get(n, n))
        return args, {**kwargs, "enable_gqa": True}

    change_arguments(node, new_arguments)
    return True
