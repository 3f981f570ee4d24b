"""Batches traced for any number of rows, b, and any length of sequence, s."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.compiler.capture.dynamic import DynamicDims
from penstock.ir.program import SizeRange

LARGER = 4  # sizes are at most so many times those of the batch


def usual_dims(batch: Mapping[str, Tensor]) -> DynamicDims:
    """The first dimension is b; the second one of tokens, masks and three-dimensional floats is s."""
    ranges: dict[str, SizeRange] = {}
    dims: dict[str, tuple[tuple[str, int] | None, ...]] = {}
    seen: dict[tuple[int, int], str] = {}

    def name(dim: int, size: int) -> tuple[str, int]:
        if (dim, size) not in seen:
            count = sum(other == dim for other, _ in seen)
            seen[dim, size] = "bs"[dim] + (str(count + 1) if count else "")
            ranges[seen[dim, size]] = SizeRange(min(size, 3), LARGER * size)
        return seen[dim, size], 1

    for key, value in batch.items():
        is_sequence = value.dim() == 3 or (value.dim() >= 2 and not value.is_floating_point())
        dims[key] = tuple(
            name(dim, size) if size > 1 and (dim == 0 or (dim == 1 and is_sequence)) else None
            for dim, size in enumerate(value.shape)
        )
    return DynamicDims(ranges, dims)
