"""Functions that compilation puts in place of torch's, and that printed files call as `functions.<name>`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..accelerator import generator_of
from ..experts.routes import (
    arrived_offsets,
    arrived_shares,
    row_numbers,
    rows_of_tokens,
    token_experts,
    token_shares,
    tokens_to_send,
    weighted,
)
from ..experts.split_experts import (
    join_part,
    member_offsets,
    member_result,
    member_rows,
    part_offsets,
    part_product,
    part_rows,
)
from ..quantised.linear_4bit import linear_4bit
from ..quantised.linear_8bit import linear_8bit
from ..quantised.linear_packed import linear_packed
from ..quantised.linear_torchao import linear_torchao
from .chains import fuse
from .chosen import gradient_if
from .chunked_loss import chunked_cross_entropy, evaluation_logits
from .document_borders import attend_in_borders, document_borders, takes_borders
from .linear_float8 import linear_float8
from .matching import linear_sum_assignment
from .member_tables import joined_members, member_lookup
from .part_loss import cross_entropy_of_parts, joined_statistics, part_statistics
from .ring_attention import as_autocast, attend_block, attention_of, with_gradients
from .tiles import in_tiles
from .token_parts import among_zeros, own_tokens, tokens_of_all

__all__ = [
    "among_zeros",
    "arrived_offsets",
    "arrived_shares",
    "attend_block",
    "attention_of",
    "chunked_cross_entropy",
    "cross_entropy_of_parts",
    "document_borders",
    "evaluation_logits",
    "fuse",
    "gradient_if",
    "in_tiles",
    "join_part",
    "joined_members",
    "joined_statistics",
    "linear_4bit",
    "linear_8bit",
    "linear_float8",
    "linear_packed",
    "linear_sum_assignment",
    "linear_torchao",
    "member_lookup",
    "member_offsets",
    "member_result",
    "member_rows",
    "own_tokens",
    "packed_attention",
    "part_offsets",
    "part_product",
    "part_rows",
    "part_statistics",
    "row_numbers",
    "rows_of_tokens",
    "token_experts",
    "token_shares",
    "tokens_of_all",
    "tokens_to_send",
    "weighted",
    "window_attention",
    "with_gradients",
]

LEAST_QUERIES, MOST_QUERIES = 128, 512  # of a block


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: int,
    after: int,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in which the query at place i sees the keys from place i - before to i + after.

    Blocks of queries see the keys around them, forward and backward, so that memory is linear in the number of queries
    and no mask is larger than a block. Backward computes each block's attention again.
    """
    return _attend_in_blocks(query, key, value, None, (before, after), dropout_p, scale, enable_gqa)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    borders: Tensor | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` in which the query at place i sees the keys up to place i of its own document.

    documents: [rows, places], one number for all tokens of a document. borders: `document_borders` of these. With
    borders, on a GPU with flash attention, the kernel for sequences of any length computes it in fp16 and bf16.
    Elsewhere blocks of queries see the keys before them, with a mask of their own that is made again in backward: none
    exists whole, or is kept. Neither way a value of `documents` is read by the host, which waits for nothing while it
    issues a step.
    """
    if borders is not None:
        query, key, value = as_autocast(query, key, value)
        if takes_borders(query, key, value, dropout_p):
            return attend_in_borders(query, key, value, borders, scale)
    return _attend_in_blocks(query, key, value, documents, (query.shape[-2], 0), dropout_p, scale, enable_gqa)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    query, key, value = as_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        found: Tensor = _BlockwiseAttention.apply(query, key, value, *options)
    return found


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, window: Any, *options: Any
    ) -> Tensor:
        ctx.window, ctx.options = window, options
        ctx.save_for_backward(query, key, value, documents)
        ctx.random_state = _random_state(query) if options[0] > 0 else None
        parts = [
            _attend(query[..., rows, :], key[..., seen, :], value[..., seen, :], mask, options)
            for rows, seen, mask in _blocks(query, key, documents, *window)
        ]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, documents = ctx.saved_tensors
        now = None if ctx.random_state is None else _random_state(query, ctx.random_state)
        sums = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (query, key, value)]
        for rows, seen, mask in _blocks(query, key, documents, *ctx.window):
            places = (rows, seen, seen)
            with torch.enable_grad():
                parts = [t[..., s, :].detach().requires_grad_() for t, s in zip((query, key, value), places)]
                out = _attend(parts[0], parts[1], parts[2], mask, ctx.options)
            for total, place, grad in zip(sums, places, torch.autograd.grad(out, parts, grads[0][..., rows, :])):
                total[..., place, :] += grad
        if now is not None:
            _random_state(query, now)
        return (*(total.to(t.dtype) for total, t in zip(sums, (query, key, value))), None, None, None, None, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: tuple[Any, ...]) -> Tensor:
    dropout_p, scale, enable_gqa = options
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)


def _blocks(
    query: Tensor, key: Tensor, documents: Tensor | None, before: int, after: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, the keys that they see, and which of these each query sees, as numbers to add. Masks of blocks at the
    same distance from their keys are one tensor, unless documents differ."""
    device = query.device
    masks: dict[tuple[int, int, int], Tensor] = {}
    for start, stop, first, last in window_blocks(query.shape[-2], key.shape[-2], before, after):
        rows, seen = slice(start, stop), slice(first, last)
        if documents is not None:
            yield rows, seen, _document_mask(documents, rows, seen, query.dtype)
            continue
        look = (stop - start, last - first, start - first)
        if look not in masks:
            places = torch.arange(start, stop, device=device).unsqueeze(-1)
            distance = torch.arange(first, last, device=device) - places
            mask = torch.zeros(distance.shape, dtype=query.dtype, device=device)
            masks[look] = mask.masked_fill_((distance < -before) | (distance > after), float("-inf"))
        yield rows, seen, masks[look]


def _document_mask(documents: Tensor, rows: slice, seen: slice, dtype: torch.dtype) -> Tensor:
    """The mask of a block that sees all keys up to its last query: its own keys are the last of these."""
    hidden = documents[:, None, rows, None] != documents[:, None, None, seen]
    size = rows.stop - rows.start
    hidden[..., -size:] |= torch.ones(size, size, dtype=torch.bool, device=documents.device).triu_(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=documents.device).masked_fill_(hidden, float("-inf"))


def window_blocks(num_queries: int, num_keys: int, before: int, after: int) -> Iterator[tuple[int, int, int, int]]:
    """The blocks of queries in a window: from which query to before which, from which key to before which."""
    size = min(max(before + after, LEAST_QUERIES), MOST_QUERIES)
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        yield start, stop, max(start - before, 0), min(stop + after, num_keys)


def _random_state(like: Tensor, new: Tensor | None = None) -> Tensor:
    """The state of the device's random generator, which is `new` from then on, if that is given."""
    generator = generator_of(like.device)
    state = generator.get_state()
    if new is not None:
        generator.set_state(new)
    return state
