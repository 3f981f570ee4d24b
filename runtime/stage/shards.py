"""The shards of a stage among the members of a group: flat, each with a slice of every segment of the stage.

Gathered weights are laid out segment after segment, so that every member's slice is received where it stays, and the
parameters are views. Gradients have the same layout, so that a scatter reads them where backward has put them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...ir.program import RowPart, Segment, StageSpec
from ..optimizer.rounding import Rounding
from .arena import BufferLayout, Place


def piece_of(tensor: Tensor, index: int, count: int) -> Tensor:
    """A copy of the piece of member `index` of `count` of a tensor that is cut alone: one row of ceil(numel / count)
    elements, the last one filled up with zeros."""
    length = -(-tensor.numel() // count)
    piece = tensor.new_zeros(length)
    own = tensor.reshape(-1)[index * length : (index + 1) * length]
    piece[: own.numel()] = own
    return piece


def whole_of(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The tensor of this shape out of all members' pieces, copied."""
    size = torch.Size(shape)
    return torch.cat([piece.reshape(-1) for piece in pieces])[: size.numel()].reshape(size)


def rounding_of(spec: StageSpec, firsts: Mapping[str, int]) -> Rounding:
    """The rounding of a stage's weights, the same for any pieces; `firsts`: the first element that is here of each
    parameter, if not 0."""
    names, starts = {}, {}
    for param in spec.params:
        names[param.name] = param.whole_name if param.part is not None else param.tied_to or param.name
        rows = param.part.begin if isinstance(param.part, RowPart) else 0
        starts[param.name] = rows * math.prod(param.shape[1:]) + firsts.get(param.name, 0)
    return Rounding(names, starts)


@dataclass(frozen=True)
class FlatStage:
    """A stage as member `index` of `count` has it. A member may have all of a parameter, a piece, or nothing."""

    spec: StageSpec
    segments: tuple[Segment, ...]
    index: int
    count: int

    @cached_property
    def part(self) -> StageSpec:
        """The stage with what this member has of each parameter, as one row."""
        return replace(self.spec, params=self.spec.pieces(self.count, self.index))

    @cached_property
    def own(self) -> BufferLayout:
        """This member's shard of the weights."""
        return self._own(self.segments, [segment.dtype for segment in self.segments])

    @cached_property
    def own_grads(self) -> BufferLayout:
        """This member's shard of the gradients."""
        return self._own(self._trained_segments, [segment.grad_dtype for segment in self._trained_segments])

    @cached_property
    def whole(self) -> BufferLayout:
        """The gathered weights."""
        places, offset = [], 0
        for segment in self.segments:
            size = segment.dtype.itemsize
            for param, start in zip(segment.params, segment.starts):
                place = Place(param.name, param.shape, segment.dtype, offset + start * size, param.numel * size)
                places.append(place)
            offset += self.count * segment.length * size
        return BufferLayout(tuple(places), offset)

    def weight_rows(self, flat: Tensor) -> list[Tensor]:
        """Per segment the members' slices (members, n), as views of gathered weights (uint8)."""
        return list(_cut(flat, [(segment, segment.dtype) for segment in self.segments], self.count))

    def weight_slices(self, shard: Tensor) -> list[Tensor]:
        """Per segment this member's slice, as a view of its shard of the weights (uint8)."""
        return [rows[0] for rows in _cut(shard, [(segment, segment.dtype) for segment in self.segments], 1)]

    def new_grads(self, device: torch.device) -> list[Tensor]:
        """Room for all gradients: per segment the members' slices (members, n). The gaps between parameters are sent
        along, so they are 0."""
        found = []
        for segment in self._trained_segments:
            rows = torch.empty(self.count, segment.length, dtype=segment.grad_dtype, device=device)
            ends = [start + param.numel for param, start in zip(segment.params, segment.starts)]
            for end, start in zip(ends, [*segment.starts[1:], rows.numel()]):
                rows.view(-1)[end:start].zero_()
            found.append(rows)
        return found

    def grad_views(self, all_rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's gradient, as a view of the members' slices."""
        return {
            param.name: rows.view(-1)[start : start + param.numel].view(param.shape)
            for segment, rows in zip(self._trained_segments, all_rows, strict=True)
            for param, start in zip(segment.params, segment.starts)
        }

    def grad_slices(self, shard: Tensor) -> list[Tensor]:
        """Per segment this member's slice, as a view of its shard of the gradients (uint8)."""
        return [
            rows[0] for rows in _cut(shard, [(segment, segment.grad_dtype) for segment in self._trained_segments], 1)
        ]

    @property
    def firsts(self) -> dict[str, int]:
        """Per parameter the first element that this member has."""
        return {name: first for name, (first, _) in self._ranges.items()}

    def piece_of(self, name: str, tensor: Tensor) -> Tensor:
        """This member's piece of a whole parameter or state: a view, if the tensor is contiguous."""
        first, last = self._ranges[name]
        return tensor.reshape(-1)[first:last]

    @property
    def _trained_segments(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.trained)

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        """Per parameter the first and last + 1 of the elements that this member has."""
        return {
            param.name: segment.range_of(number, self.index)
            for segment in self.segments
            for number, param in enumerate(segment.params)
        }

    def _own(self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype]) -> BufferLayout:
        places, offset = [], 0
        for segment, dtype in zip(segments, dtypes):
            size = dtype.itemsize
            for param, start in zip(segment.params, segment.starts):
                first, last = self._ranges[param.name]
                begin = max(0, start - self.index * segment.length) if first < last else 0
                place = Place(param.name, (last - first,), dtype, offset + begin * size, (last - first) * size)
                places.append(place)
            offset += segment.length * size
        return BufferLayout(tuple(places), offset)


def _cut(flat: Tensor, rows: Sequence[tuple[Segment, torch.dtype]], count: int) -> Iterator[Tensor]:
    """Per segment, in its dtype, a view (count, n) of `flat` (uint8), which has them one after the other."""
    start = 0
    for segment, dtype in rows:
        end = start + count * segment.length * dtype.itemsize
        yield flat[start:end].view(dtype).view(count, segment.length)
        start = end
