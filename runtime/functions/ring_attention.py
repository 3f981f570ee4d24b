"""Attention over keys and values that arrive in blocks, each of which a member of a team had first (ring attention).

A partial attention [rows, heads, tokens, width + 3], in fp32 at least, has for each query the sum of the values of the
keys seen so far, times the exponentials of their scores less the largest one; this largest score; the sum of these
exponentials; and a zero, in whose place its gradient has one more number. What comes of two blocks follows from what
comes of each (Ring Attention, Liu 2023, 2). Score and sum are kept apart, as a mask of large negative numbers may hide
all keys of a query, which then sees all of them alike; one of booleans may, too, and the query's attention is 0, as
torch's.

No gradient goes through a partial attention. What queries, keys and values of a block get follows from the block
itself, the query's final largest score and sum, its attention's gradient, and the product of attention and gradient
(FlashAttention-2, Dao 2023, algorithm 2): these four are what `attention_of` hands back as the gradient of the last
partial attention, and they are the gradient of each one before it as they are. So backward needs no partial attention
but the last.

Which keys a query sees by their places is an interval around its own. Of N members, member r has the r-th of N runs of
tokens, or in zigzag, of 2 N runs, number r and number 2 N - 1 - r (`token_parts.py`). Of causal attention in zigzag the
first run of keys of a member with a lower number is seen by both runs of queries, and both runs of keys of one with a
higher number by the second run of queries: either way two products of one run with one run, of which only the operands
differ, so that all members do the same work and no host asks which it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .token_parts import own_tokens

QUERIES = 512  # of which the products with all keys of a block exist at once
EITHER = 2  # the first run where the keys are of a member with a lower number, else the second
MORE = 3  # numbers of a partial attention beside the sum of values
BlockTiles = list[tuple[slice, slice]]  # queries, and the keys around those that they see
Some = Callable[[BlockTiles], Iterable[tuple[slice, slice]]]


class _Way(NamedTuple):
    step: int
    team: int
    zigzag: bool
    before: int | None
    after: int | None
    scale: float | None


class Visible(NamedTuple):
    """The keys that queries see, and the scale of their scores.

    The query at place i sees the keys from place i - before to i + after, all of them where that is None, as far as
    `mask` [rows, heads, all tokens, all tokens] shows them (booleans, or numbers to add; dimensions may be 1), of its
    own document (documents: [rows, all tokens]).
    """

    before: int | None = None
    after: int | None = None
    scale: float | None = None
    mask: Tensor | None = None
    documents: Tensor | None = None

    def way(self, step: int, team: int, zigzag: bool) -> _Way:
        return _Way(step, team, zigzag, self.before, self.after, self.scale)


@torch.no_grad()
def attend_block(
    partial: Tensor | None, query: Tensor, key: Tensor, value: Tensor, member: Tensor, step: int, team: int,
    zigzag: bool = False, some: Some | None = None, **visible: Any,
) -> Tensor:  # fmt: skip
    """The partial attention of a member's queries [rows, heads, tokens, width] with the keys and values, too, that have
    come round `step` members; with its own, step 0, there is no `partial` before. Heads of keys may each serve several
    of the queries'.

    member: [1], the number of this one among `team`; in `zigzag` each has two runs of tokens. `some`: those of the
    tiles of a product that are computed; all unless given. `visible`: the fields of `Visible`.
    """
    keys = Visible(**visible)
    block = _Block(query, key, value, member, keys.mask, keys.documents, keys.way(step, team, zigzag), some)
    found = block.empty_result() if partial is None else partial.clone()
    for product in block.products():
        product.attend(found)
    return found


def with_gradients(
    partial: Tensor | None, query: Tensor, key: Tensor, value: Tensor, member: Tensor, step: int, team: int,
    zigzag: bool = False, some: Some | None = None, **visible: Any,
) -> Tensor:  # fmt: skip
    """The result of `attend_block` for these operands, unchanged; the gradients of the queries, keys and values follow
    from that of the result. None in a rematerialisation, for which this needs no value."""
    keys = Visible(**visible)
    found: Tensor = _Gradients.apply(
        partial, query, key, value, member, keys.mask, keys.documents, keys.way(step, team, zigzag), some
    )
    return found


def attention_of(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The attention, once all keys were seen."""
    found: Tensor = _Attention.apply(partial, dtype)
    return found


def visible_steps(tokens: int, team: int, zigzag: bool, before: int | None, after: int | None) -> list[int]:
    """The steps with keys that some member's queries see by their places. tokens: the number of each member."""
    return [step for step in range(team) if _visible_pairs(tokens, _Way(step, team, zigzag, before, after, None))]


def as_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands as autocast casts those of torch's own attention."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operands
    return tuple(operand.to(torch.get_autocast_dtype(kind)) for operand in operands)


class _Pair(NamedTuple):
    """A run of queries and a run of keys of which some are seen: 0 or 1, `EITHER`, or None for all tokens. `distance`:
    how many places the first query comes after the first key, for those members where any key is seen; None where it
    differs among these. `covered`: all keys are seen, whichever the member. `alone`: not all members see any."""

    queries: int | None
    keys: int | None
    distance: int | None = None
    covered: bool = False
    alone: bool = False


@functools.lru_cache(maxsize=4096)
def _visible_pairs(tokens: int, way: _Way) -> tuple[_Pair, ...]:
    """The products of a step. tokens: the number of each member."""
    if way.before is None and way.after is None:
        return (_Pair(None, None, covered=True),)
    run = tokens // 2 if way.zigzag else tokens
    pairs: list[tuple[int | None, int | None]] = [(None, None)]
    if way.zigzag:
        each = way.after == 0 and way.step > 0
        pairs = [(1, 0), (EITHER, EITHER)] if each else [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = []
    for pair in pairs:
        distances = [int(_distance(*pair, member, way)) * run for member in range(way.team)]
        seen = [d for d in distances if _is_visible(d - run + 1, d + run - 1, way)]
        if seen:
            covered = all(_is_covered(d - run + 1, d + run - 1, way) for d in distances)
            one = seen[0] if len(set(seen)) == 1 else None
            found.append(_Pair(*pair, one, covered, len(seen) < len(distances)))
    return tuple(found)


def _distance(queries: int | None, keys: int | None, member: Any, way: _Way) -> Any:
    """The number of runs from the run of keys to the run of queries, for a member's number or a tensor of it."""
    other = (member - way.step) % way.team
    if queries == EITHER:
        return abs(member - other)
    numbers = (2 * way.team - 1 - number if run == 1 else number for run, number in ((queries, member), (keys, other)))
    first, second = numbers
    return first - second


def _is_visible(least: int, most: int, way: _Way) -> bool:
    """Whether a query may see a key whose place is `least` to `most` before its own."""
    return (way.before is None or least <= way.before) and (way.after is None or most >= -way.after)


def _is_covered(least: int, most: int, way: _Way) -> bool:
    """Whether it sees all of these keys."""
    return (way.before is None or most <= way.before) and (way.after is None or least >= -way.after)


class _Block:
    """A member's queries, the keys and values that are there, and what hides some of these from the queries."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, member: Tensor, mask: Tensor | None, documents: Tensor | None,
        way: _Way, some: Some | None,
    ):  # fmt: skip
        self.some = some or iter
        self.query, self.key, self.value = as_autocast(query, key, value)
        self.member, self.way, self.tokens = member, way, query.shape[-2]
        self.scale = query.shape[-1] ** -0.5 if way.scale is None else way.scale
        self.wide = torch.promote_types(self.query.dtype, torch.float32)
        other = (member - way.step) % way.team
        length = self.tokens * way.team
        self.mask, self.documents = None, None
        if mask is not None:
            own = mask[(None,) * (4 - mask.dim())]
            for dim, number in ((2, member), (3, other)):
                if own.shape[dim] == length > 1:
                    own = own_tokens(own, number, way.team, dim, length, zigzag=way.zigzag)
            self.mask = own
        if documents is not None:
            numbers = (own_tokens(documents, n, way.team, 1, length, zigzag=way.zigzag) for n in (member, other))
            self.documents = tuple(numbers)

    def empty_result(self) -> Tensor:
        """The partial attention before the first block."""
        shape = (*self.query.shape[:-1], self.value.shape[-1] + MORE)
        found = torch.zeros(shape, dtype=self.wide, device=self.query.device)
        found[..., -MORE] = float("-inf")
        return found

    def products(self) -> Iterator[_Product]:
        for pair in _visible_pairs(self.tokens, self.way):
            yield _Product(self, pair)


class _Product:
    """One run of queries and one of keys."""

    def __init__(self, block: _Block, pair: _Pair):
        self.block, self.pair, self.way = block, pair, block.way
        self.lower = block.member >= block.way.step  # the keys are of a member with a lower number
        self.query = self.run(block.query, pair.queries)
        self.key, self.value = (self.run(t, pair.keys) for t in (block.key, block.value))
        self.mask = block.mask
        if self.mask is not None:
            for dim, run in ((2, pair.queries), (3, pair.keys)):
                self.mask = self.run(self.mask, run, dim) if self.mask.shape[dim] > 1 else self.mask
        self.documents = None
        if block.documents is not None:
            first, second = block.documents
            self.documents = self.run(first, pair.queries, 1), self.run(second, pair.keys, 1)

    def run(self, whole: Tensor, number: int | None, dim: int = -2) -> Tensor:
        """A run of all tokens: a part of them, but for `EITHER` a copy."""
        if number is None:
            return whole
        first, second = whole.chunk(2, dim)
        return torch.where(self.lower, first, second) if number == EITHER else (first, second)[number]

    def add(self, total: Tensor, number: int | None, rows: slice, more: Tensor) -> None:
        """Add to some tokens of a run."""
        if number != EITHER:
            self.run(total, number)[..., rows, :] += more
            return
        first, second = total.chunk(2, -2)
        first[..., rows, :] += more.masked_fill(~self.lower, 0)
        second[..., rows, :] += more.masked_fill(self.lower, 0)

    def attend(self, partial: Tensor) -> None:
        """Let a partial attention, in place, have seen these keys, too."""
        own = self.run(partial, self.pair.queries)
        for rows, seen in self.slices():
            scores, part = self.scores(rows, seen), own[..., rows, :]
            values, (most, total, _) = part[..., :-MORE], part[..., -MORE:].split(1, dim=-1)
            top = torch.maximum(most, scores.amax(-1, keepdim=True))
            base = top.masked_fill(top == float("-inf"), 0)  # no key is seen yet
            weights = (scores - base).exp()
            more, before = weights.sum(-1, keepdim=True), (most - base).exp()
            mean = self.times_values((weights / more.clamp(min=torch.finfo(more.dtype).tiny)), seen)
            parts = (values * before + mean * more, top, total * before + more, torch.zeros_like(top))
            part.copy_(torch.cat(parts, dim=-1))
        if self.pair.queries == EITHER:
            first, second = partial.chunk(2, -2)
            first.copy_(torch.where(self.lower, own, first))
            second.copy_(torch.where(self.lower, second, own))

    def times_values(self, weights: Tensor, seen: slice) -> Tensor:
        """Weights [rows, heads, m, n] times the values of n keys."""
        low = _group_heads(weights.to(self.value.dtype), self.value) @ self.value[..., seen, :]
        return low.view(*weights.shape[:-1], -1).to(weights.dtype)

    def gradients(self, given: Tensor, sums: list[Tensor]) -> None:
        """Add the gradients of queries, keys and values, by what is handed back for the partial attention."""
        own, low, (query, key, value) = self.run(given, self.pair.queries), self.query.dtype, sums
        for rows, seen in self.slices():
            part, of = own[..., rows, :], self.query[..., rows, :]
            base, inverse, shared = part[..., -MORE:].split(1, dim=-1)
            weights = (self.scores(rows, seen) - base).exp() * inverse
            grad = _group_heads(part[..., :-MORE].to(low), self.value)
            self.add(value, self.pair.keys, seen, _group_heads(weights.to(low), self.value).mT @ grad)
            of_weights = (grad @ self.value[..., seen, :].mT).view(weights.shape).to(weights.dtype)
            of_scores = _group_heads((weights * (of_weights - shared) * self.block.scale).to(low), self.key)
            self.add(query, self.pair.queries, rows, (of_scores @ self.key[..., seen, :]).view(of.shape))
            self.add(key, self.pair.keys, seen, of_scores.mT @ _group_heads(of, self.key))

    def slices(self) -> Iterable[tuple[slice, slice]]:
        return self.block.some(list(self.tiles()))

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        queries, keys, way, distance = self.query.shape[-2], self.key.shape[-2], self.way, self.pair.distance
        for start in range(0, queries, QUERIES):
            stop, first, last = min(start + QUERIES, queries), 0, keys
            if distance is not None and not self.pair.covered:
                first = first if way.before is None else max(first, start + distance - way.before)
                last = last if way.after is None else min(last, stop + distance + way.after)
            if first < last:
                yield slice(start, stop), slice(first, last)

    def scores(self, rows: slice, seen: slice) -> Tensor:
        """[rows, heads, m, n] of m queries and n keys, -inf where a query does not see a key."""
        query = self.query[..., rows, :]
        found = _group_heads(query, self.key) @ self.key[..., seen, :].mT
        scores = found.view(*query.shape[:-1], -1).to(self.block.wide) * self.block.scale
        hidden = self.hidden_by_place(rows, seen)
        if self.documents is not None:
            first, second = self.documents
            others = first[:, None, rows, None] != second[:, None, None, seen]
            hidden = others if hidden is None else hidden | others
        if self.mask is not None:
            shape = self.mask.shape
            tile = self.mask[..., rows if shape[2] > 1 else slice(None), seen if shape[3] > 1 else slice(None)]
            if tile.dtype != torch.bool:
                scores = scores + tile.to(scores.dtype)
            else:
                hidden = ~tile if hidden is None else hidden | ~tile
        return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))

    def hidden_by_place(self, rows: slice, seen: slice) -> Tensor | None:
        """The mask [m, n] of keys that the queries do not see because of their places; None where they see all."""
        way, pair, given = self.way, self.pair, self.pair.distance
        if pair.covered:
            return None
        own = _distance(pair.queries, pair.keys, self.block.member, way) * self.query.shape[-2]  # the member's
        hidden = []
        least, most = rows.start - seen.stop + 1, rows.stop - 1 - seen.start
        if given is None or not _is_covered(least + given, most + given, way):
            places = [torch.arange(part.start, part.stop, device=self.query.device) for part in (rows, seen)]
            apart = places[0][:, None] - places[1] + (own if given is None else given)
            hidden += [] if way.before is None else [apart > way.before]
            hidden += [] if way.after is None else [apart < -way.after]
        if given is not None and pair.alone:
            hidden.append((own != given)[:, None])
        return functools.reduce(torch.logical_or, hidden) if hidden else None


def _group_heads(operand: Tensor, like: Tensor) -> Tensor:
    """[rows, heads, m, n] with the heads that share one of keys one after the other along m."""
    groups = like.shape[1]
    if operand.shape[1] == groups:
        return operand
    return operand.reshape(operand.shape[0], groups, -1, operand.shape[-1])


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: Tensor | None, query: Tensor, key: Tensor, value: Tensor, member: Tensor,
        mask: Tensor | None, documents: Tensor | None, way: _Way, some: Some | None,
    ) -> Tensor:  # fmt: skip
        ctx.way, ctx.some = way, some
        ctx.save_for_backward(query, key, value, member, mask, documents)
        kind = query.device.type
        ctx.low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        if partial is not None:
            return partial.view_as(partial)
        shape = (*query.shape[:-1], value.shape[-1] + MORE)
        return query.new_empty((), dtype=torch.promote_types(ctx.low, torch.float32)).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, member, mask, documents = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            low = [operand.to(ctx.low) for operand in (query, key, value)]
            block = _Block(low[0], low[1], low[2], member, mask, documents, ctx.way, ctx.some)
            sums = [torch.zeros(t.shape, dtype=block.wide, device=t.device) for t in (query, key, value)]
            for product in block.products():
                product.gradients(grads[0], sums)
        own = (total.to(operand.dtype) for total, operand in zip(sums, (query, key, value)))
        return (None, *own, None, None, None, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(partial)
        return (partial[..., :-MORE] * _inverse(partial)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (partial,) = ctx.saved_tensors
        inverse, most = _inverse(partial), partial[..., -MORE, None]
        given = grads[0].to(partial.dtype)
        shared = (given * partial[..., :-MORE] * inverse).sum(-1, keepdim=True)
        return torch.cat((given, most.masked_fill(most == float("-inf"), 0), inverse, shared), dim=-1), None


def _inverse(partial: Tensor) -> Tensor:
    """One over the sum of exponentials; 0 for a query that sees no key."""
    total = partial[..., -MORE + 1, None]
    return torch.where(total > 0, 1 / total, torch.zeros_like(total))
