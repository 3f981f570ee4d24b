"""Attention over keys and values that arrive in blocks, each of which a member of a team had first (ring attention).

A partial attention has, for each query, the weighted mean of the values of the keys seen so far and the logarithm of
the sum of their weights, in fp32 at least: what comes of two blocks follows from what comes of each (Ring Attention,
Liu 2023, 2; the log-sum-exp of FlashAttention). It is one tensor [rows, heads, tokens, width + 1], the logarithm last.

Of causal attention, member r of N has its tokens in zigzag: of 2 N runs, number r and number 2 N - 1 - r. Its own keys
it sees as a causal attention does. Of those of a member with a lower number its queries see the first run; of those of
a member with a higher number its second run of queries sees both runs. Either way it is two products of one run with
one run, of which only the operands differ, so that all members do the same work and no host asks which it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 512  # of which the products with all keys of a block stand at once


def attend_first(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
    """The partial attention of a member's queries [rows, heads, tokens, width] to its own keys and values, whose heads
    may each serve several of the queries'."""
    query, key, value = as_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        return _joined(_attend(query, key, value, is_causal, scale))


def attend_next(
    partial: Tensor, query: Tensor, key: Tensor, value: Tensor, member: Tensor, step: int, is_causal: bool,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The partial attention with the keys and values, too, that have come round `step` members. member: [1], the
    number of this one."""
    query, key, value = as_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        if not is_causal:
            return _joined(_merged(_apart(partial), _attend(query, key, value, False, scale)))
        (q0, q1), (k0, k1), (v0, v1) = (t.chunk(2, dim=-2) for t in (query, key, value))
        first, second = (_apart(half) for half in partial.chunk(2, dim=-2))
        from_lower = member >= step  # the keys are of a member with a lower number
        second = _merged(second, _attend(q1, k0, v0, False, scale))
        operands = [torch.where(from_lower, a, b) for a, b in ((q0, q1), (k0, k1), (v0, v1))]
        before = tuple(torch.where(from_lower, a, b) for a, b in zip(first, second))
        more = _merged((before[0], before[1]), _attend(operands[0], operands[1], operands[2], False, scale))
        first = tuple(torch.where(from_lower, a, b) for a, b in zip(more, first))  # type: ignore[assignment]
        second = tuple(torch.where(from_lower, a, b) for a, b in zip(second, more))  # type: ignore[assignment]
        return torch.cat((_joined(first), _joined(second)), dim=-2)


def attention_of(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The attention, once all keys were seen."""
    return partial[..., :-1].to(dtype)


def as_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands as autocast casts those of torch's own attention."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operands
    return tuple(operand.to(torch.get_autocast_dtype(kind)) for operand in operands)


Attended = tuple[Tensor, Tensor]  # the weighted mean of values, and the logarithm of the sum of weights


def _apart(partial: Tensor) -> Attended:
    return partial[..., :-1], partial[..., -1:]


def _joined(parts: Attended) -> Tensor:
    return torch.cat(parts, dim=-1)


def _merged(one: Attended, other: Attended) -> Attended:
    """What two attentions to different keys are together."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - total).exp() + other[0] * (other[1] - total).exp(), total


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Attended:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    found: Attended = _Attention.apply(query, key, value, is_causal, factor)
    return found


class _Attention(torch.autograd.Function):
    """Attention with the logarithm of the sum of weights, some queries at a time; backward makes the weights again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, factor: float) -> Attended:
        wide = torch.promote_types(query.dtype, torch.float32)
        outs, logs = [], []
        for rows, seen in _blocks(query, key, is_causal):
            scores = _scores(query, key, rows, seen, is_causal, factor, wide)
            log = scores.logsumexp(-1, keepdim=True)
            outs.append((scores - log).exp().to(query.dtype) @ value[..., seen, :])
            logs.append(log)
        out, log = torch.cat(outs, dim=-2).to(wide), torch.cat(logs, dim=-2)
        ctx.is_causal, ctx.factor = is_causal, factor
        ctx.save_for_backward(query, key, value, out, log)
        return out, log

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, log = ctx.saved_tensors
        wide, (of_out, of_log) = out.dtype, grads
        own = []
        sums = [torch.zeros_like(t, dtype=wide) for t in (key, value)]
        for rows, seen in _blocks(query, key, ctx.is_causal):
            scores = _scores(query, key, rows, seen, ctx.is_causal, ctx.factor, wide)
            weights, given = (scores - log[..., rows, :]).exp(), of_out[..., rows, :]
            low = given.to(query.dtype)
            sums[1][..., seen, :] += weights.to(query.dtype).mT @ low
            # A weight grows with its own share of the logarithm, too.
            rest = (given * out[..., rows, :]).sum(-1, keepdim=True) - of_log[..., rows, :]
            of_scores = (weights * ((low @ value[..., seen, :].mT).to(wide) - rest) * ctx.factor).to(query.dtype)
            own.append(of_scores @ key[..., seen, :])
            sums[0][..., seen, :] += of_scores.mT @ query[..., rows, :]
        return torch.cat(own, dim=-2), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None


def _blocks(query: Tensor, key: Tensor, is_causal: bool) -> list[tuple[slice, slice]]:
    """Queries, and the keys that they see."""
    count = query.shape[-2]
    starts = range(0, count, QUERIES)
    rows = [slice(start, min(start + QUERIES, count)) for start in starts]
    return [(part, slice(0, part.stop if is_causal else key.shape[-2])) for part in rows]


def _scores(
    query: Tensor, key: Tensor, rows: slice, seen: slice, is_causal: bool, factor: float, wide: torch.dtype
) -> Tensor:
    scores = (query[..., rows, :] @ key[..., seen, :].mT).to(wide) * factor
    if is_causal:  # the last keys are the queries' own
        size = rows.stop - rows.start
        hidden = torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
        scores[..., -size:].masked_fill_(hidden, float("-inf"))
    return scores
