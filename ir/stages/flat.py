"""The layout of a stage that devices share: flat, so that a shard of it is a contiguous slice.

In: a stage's parameters and the number of members. Out: segments, one after the other. In a segment are all
parameters of one dtype that are trained, or all that are frozen, so that gradients are cut where the weights are. Each
segment is filled up to a multiple of the number of members, and a member's shard has an equal slice of every segment. A
parameter of several stages is a segment of its own: all stages cut it alike, so that its gradients can be added up
shard by shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .stage import ParamSpec

ALIGNMENT = 512  # bytes: each parameter, and each member's slice, starts at a multiple of it


@dataclass(frozen=True)
class Segment:
    """Parameters one after the other in memory. `starts`: the first element of each; `length`: the elements of one
    member's slice."""

    params: tuple[ParamSpec, ...]
    starts: tuple[int, ...]
    length: int

    @property
    def trained(self) -> bool:
        return self.params[0].requires_grad

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.params[0])

    @property
    def grad_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.params[0].grad_dtype)
        return found

    @property
    def slice_param(self) -> ParamSpec:
        """A member's slice as one parameter, for the count of bytes. Hooks and changes are the longest of any."""
        hook = max((param.hook for param in self.params), key=len)
        change = max((param.change for param in self.params), key=len)
        return replace(self.params[0], shape=(self.length,), part=None, hook=hook, change=change)

    def range_of(self, number: int, index: int) -> tuple[int, int]:
        """The first and the last + 1 of those elements of parameter `number` that member `index` has."""
        start, numel = self.starts[number], self.params[number].numel
        first, last = index * self.length - start, (index + 1) * self.length - start
        return min(max(first, 0), numel), min(max(last, 0), numel)

    def pieces_of(self, index: int) -> Iterator[tuple[ParamSpec, int]]:
        """The parameters of which member `index` has elements, and how many of each."""
        number = max(0, bisect_right(self.starts, index * self.length) - 1)
        while number < len(self.starts) and self.starts[number] < (index + 1) * self.length:
            first, last = self.range_of(number, index)
            if last > first:
                yield self.params[number], last - first
            number += 1

    def turning_points(self, count: int) -> set[int]:
        """Of `count` members, those whose pieces may differ from the pieces of the member before: the first and the
        last with a part of each parameter, and the members after them."""
        found = {0}
        for start, param in zip(self.starts, self.params):
            first, last = start // self.length, max(start, start + param.numel - 1) // self.length
            found |= {first, first + 1, last, last + 1}
        return {index for index in found if index < count}


def segments_of(params: Sequence[ParamSpec], count: int) -> tuple[Segment, ...]:
    """The segments of a stage for `count` members."""
    rows: dict[tuple[str, str, bool, str], list[ParamSpec]] = {}
    for param in params:
        apart = param.name if param.shared else ""
        rows.setdefault((param.dtype, param.grad_dtype, param.requires_grad, apart), []).append(param)
    return tuple(_segment(row, count) for row in rows.values())


def _segment(params: Sequence[ParamSpec], count: int) -> Segment:
    step = ALIGNMENT // _dtype(params[0]).itemsize
    starts, end = [], 0
    for param in params:
        starts.append(end)
        end += -(-param.numel // step) * step
    return Segment(tuple(params), tuple(starts), -(-end // (count * step)) * step)


def _dtype(param: ParamSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, param.dtype)
    return found
