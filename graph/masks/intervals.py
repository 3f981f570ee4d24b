"""Masks and index tensors of one row per query and one column per key, in memory of one row and one column.

In: vectors, and calls on them. Out: `Intervals`, for a tensor with one value on an interval of each row's keys and
another outside of it, or `Sums`, for integers that are a row's number plus a column's. The calls that stay inside of
these two forms are followed exactly; all others raise `Unfollowed`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Operators of ATen.
FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
SUMS = ("add", "sub", "rsub", "neg")
FILLS = ("ones", "zeros", "full")  # also with `new_` before or `_like` after them


class Unfollowed(Exception):
    """A call whose result has neither form."""


@dataclass(frozen=True)
class Intervals:
    """Row q has the value `inside` for keys begin[..., q] <= k < end[..., q], and `outside` for the others.

    The two values are tensors of one element. `num_keys` is the length of a row.
    """

    begin: Tensor
    end: Tensor
    inside: Tensor
    outside: Tensor
    num_keys: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.begin.shape, self.num_keys)

    @property
    def dtype(self) -> torch.dtype:
        return self.inside.dtype

    @property
    def is_constant(self) -> bool:
        return bool((self.begin == 0).all() and (self.end == self.num_keys).all()) or _same(self.inside, self.outside)

    def has_rows_of(self, other: Intervals) -> bool:
        """Whether the intervals are those of `other`, whatever the values."""
        return bool((self.begin == other.begin).all() and (self.end == other.end).all())

    def complement(self) -> Intervals:
        """The same tensor as intervals of what is outside now, which must be at one end of each row."""
        begin, end, size = self.begin, self.end, self.num_keys
        is_empty, at_start, at_end = end <= begin, begin == 0, end == size
        if not bool((is_empty | at_start | at_end).all()):
            raise Unfollowed
        first = torch.where(is_empty | ~at_start, 0, end)
        last = torch.where(is_empty | at_start, size, begin)
        return Intervals(first, last, self.outside, self.inside, size)

    def with_values(self, inside: Tensor, outside: Tensor) -> Intervals:
        return replace(self, inside=inside, outside=outside)

    def broadcast(self, shape: Sequence[int]) -> Intervals:
        """The same tensor, broadcast to a shape with rows of the same length."""
        return replace(self, begin=self.begin.expand(*shape[:-1]), end=self.end.expand(*shape[:-1]))

    def apply_view(self, view: Callable[[Tensor], Tensor]) -> Intervals:
        """The tensor after a call that only changes dimensions other than the keys'."""
        begin, end = (view(t.unsqueeze(-1).expand(self.shape)) for t in (self.begin, self.end))
        keys = view(torch.arange(self.num_keys).expand(self.shape))
        steps = [step for step, size in zip(keys.stride()[:-1], keys.shape) if size > 1]
        if keys.shape[-1] != self.num_keys or (self.num_keys > 1 and keys.stride(-1) != 1) or any(steps):
            raise Unfollowed
        return replace(self, begin=begin[..., 0], end=end[..., 0])


@dataclass(frozen=True)
class Sums:
    """The integers rows[..., q, 1] + columns[..., 1, k], or their absolute values."""

    rows: Tensor
    columns: Tensor
    is_absolute: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.rows.shape, self.columns.shape))

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64

    def apply_view(self, view: Callable[[Tensor], Tensor]) -> Sums:
        """The tensor after a call that only changes dimensions other than the last two."""
        rows, columns = view(self.rows.expand(self.shape)), view(self.columns.expand(self.shape))
        if rows.dim() < 2 or rows.stride(-1) or columns.stride(-2) or rows.shape[-2:] != self.shape[-2:]:
            raise Unfollowed
        return Sums(rows[..., :1], columns[..., :1, :], self.is_absolute)


Followed = Intervals | Sums


def constant(value: Tensor, shape: Sequence[int]) -> Intervals:
    """A tensor of this shape with one value."""
    return Intervals(
        torch.zeros(shape[:-1], dtype=torch.int64), torch.full(shape[:-1], shape[-1]), value, value, shape[-1]
    )


def as_sums(value: Any, shape: Sequence[int]) -> Sums:
    """A number, or a tensor with one row or one column, as sums that broadcast to `shape`."""
    if isinstance(value, Sums):
        return value
    tensor = torch.as_tensor(value) if isinstance(value, (Tensor, int)) else None
    if tensor is None or tensor.is_floating_point() or tensor.is_complex():
        raise Unfollowed  # moved to the other side of a comparison, floats would be rounded otherwise
    tensor, zero = tensor.long(), torch.zeros(1, 1, dtype=torch.int64)
    if tensor.dim() == 0 or tensor.shape[-1] == 1:
        rows = tensor if tensor.dim() > 1 else tensor.view(1, 1)
        return Sums(rows, zero)
    if tensor.dim() == 1 or tensor.shape[-2] == 1:
        return Sums(zero, tensor if tensor.dim() > 1 else tensor.view(1, -1))
    raise Unfollowed


def as_intervals(value: Any, shape: Sequence[int]) -> Intervals:
    """A tensor with one value, or a boolean one with one row or one column, as intervals of rows of `shape`."""
    if isinstance(value, Intervals):
        return value
    if not isinstance(value, Tensor):
        raise Unfollowed
    flat = value.reshape(-1)
    if bool((flat == flat[0]).all()):
        return constant(flat[:1] if value.dim() else value, shape)
    if value.dtype != torch.bool:
        raise Unfollowed
    no, yes, size = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool), shape[-1]
    begin, end = first_and_last(value if value.dim() > 1 else value.view(1, -1))
    end = torch.where(end > 0, size, 0) if value.shape[-1] == 1 else end
    rows = (*torch.broadcast_shapes(begin.shape[:-1], shape[:-2]), shape[-2])
    return Intervals(begin.expand(rows), end.expand(rows), yes, no, size)


def first_and_last(visible: Tensor) -> tuple[Tensor, Tensor]:
    """The begin and the end of the only run of True in each row."""
    size, count = visible.shape[-1], visible.sum(-1)
    begin = visible.to(torch.uint8).argmax(-1)
    last = size - visible.flip(-1).to(torch.uint8).argmax(-1)
    end = torch.where(count > 0, last, begin)
    if not bool((end - begin == count).all()):
        raise Unfollowed
    return begin, end


def compare(name: str, left: Sums, right: Sums, shape: Sequence[int]) -> Intervals:
    """`left < right` and the like. `shape`: that of the result."""
    if left.is_absolute or right.is_absolute:
        return _compare_absolute(name, left, right, shape)
    columns, rows = left.columns - right.columns, right.rows - left.rows
    steps = columns.diff(dim=-1)
    if bool((steps < 0).any()):
        if bool((steps > 0).any()):
            raise Unfollowed
        columns, rows, name = -columns, -rows, FLIPPED[name]
    lead = torch.broadcast_shapes(columns.shape[:-2], rows.shape[:-2])
    columns = columns.expand(*lead, 1, shape[-1]).squeeze(-2).contiguous()
    rows = rows.expand(*lead, shape[-2], 1).squeeze(-1).contiguous()
    before = torch.searchsorted(columns, rows)
    until = torch.searchsorted(columns, rows, right=True)
    zero, size = torch.zeros_like(before), torch.full_like(before, shape[-1])
    begin, end = {
        "lt": (zero, before), "le": (zero, until), "gt": (until, size), "ge": (before, size),
        "eq": (before, until), "ne": (before, until),
    }[name]  # fmt: skip
    inside = torch.tensor([name != "ne"])
    return Intervals(begin, end, inside, ~inside, shape[-1])


def _compare_absolute(name: str, left: Sums, right: Sums, shape: Sequence[int]) -> Intervals:
    """|sum| against a number."""
    if right.is_absolute:
        left, right, name = right, left, FLIPPED[name]
    if right.is_absolute or right.rows.numel() != 1 or right.columns.numel() != 1 or name in ("eq", "ne"):
        raise Unfollowed
    if name in ("gt", "ge"):
        found = _compare_absolute("le" if name == "gt" else "lt", left, right, shape)
        return found.with_values(found.outside, found.inside)
    plain, minus = replace(left, is_absolute=False), Sums(-right.rows, -right.columns)
    above, below = compare(FLIPPED[name], plain, minus, shape), compare(name, plain, right, shape)
    return combine(operator.and_, [above, below])


def combine(call: Callable[..., Tensor], operands: Sequence[Intervals]) -> Intervals:
    """An elementwise call on tensors of this form."""
    varying = [i for i, operand in enumerate(operands) if not operand.is_constant]
    values = [operand.inside for operand in operands]
    if len(varying) > 2:
        raise Unfollowed
    if len(varying) < 2:
        one = operands[varying[0] if varying else 0]
        outside = [operand.outside if i in varying else operand.inside for i, operand in enumerate(operands)]
        return one.with_values(call(*values), call(*outside))
    a, b = (operands[i] for i in varying)

    def apply(x: Tensor, y: Tensor) -> Tensor:
        chosen = list(values)
        chosen[varying[0]], chosen[varying[1]] = x, y
        return call(*chosen)

    return _meeting(a, b, apply)


def _meeting(a: Intervals, b: Intervals, at: Callable[[Tensor, Tensor], Tensor]) -> Intervals:
    """Two tensors' values at each place, joined by `at`."""
    both, only_a = at(a.inside, b.inside), at(a.inside, b.outside)
    only_b, neither = at(a.outside, b.inside), at(a.outside, b.outside)
    if a.has_rows_of(b):
        return a.with_values(both, neither)
    if _same(both, only_a) and _same(only_b, neither):
        return a.with_values(both, neither)
    if _same(both, only_b) and _same(only_a, neither):
        return b.with_values(both, neither)
    for left, right, value, others in (
        (a, b, both, (only_a, only_b, neither)),
        (a, b.complement, only_a, (both, only_b, neither)),
        (a.complement, b, only_b, (both, only_a, neither)),
        (a.complement, b.complement, neither, (both, only_a, only_b)),
    ):
        if _same(others[0], others[1]) and _same(others[1], others[2]):
            x, y = (side if isinstance(side, Intervals) else side() for side in (left, right))
            begin = torch.maximum(x.begin, y.begin)
            end = torch.maximum(torch.minimum(x.end, y.end), begin)
            return Intervals(begin, end, value, others[0], x.num_keys)
    raise Unfollowed


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and bool((a == b).all()))
