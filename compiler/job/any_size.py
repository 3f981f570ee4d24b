"""Batches whose sizes differ from step to step.

In: a batch, or its micro-batches one by one, as gradient accumulation has them. Out: micro-batches with their sizes,
and each at its place in tensors of the largest batch, in which devices look for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import BatchError
from ...runtime.torch_names import tree_map
from ..batches.shape import BatchShape
from ..batches.sizes import BatchSizes
from .counts import rows_of


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch: as the user hands them over, by the names of the programs' inputs, and the number of each
    size. `files`: the folder of its form; None for the job's own."""

    batch: Any
    leaves: dict[str, Tensor]
    sizes: dict[str, int]
    files: Path | None = None


def is_listed(batch: Any, shape: BatchShape) -> bool:
    """Whether a batch is a list of micro-batches."""
    if not isinstance(batch, list) or not batch:
        return False
    return all(isinstance(each, (Mapping, tuple, list)) or len(shape.leaves) == 1 for each in batch)


def join(micro_batches: Sequence[Any]) -> Any:
    """Micro-batches of one shape as one batch."""
    try:
        return tree_map(lambda *of: torch.cat(of) if isinstance(of[0], Tensor) else of[0], *micro_batches)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BatchError(
            f"the {len(micro_batches)} micro-batches make no batch of one shape ({error}); compile with dynamic_shapes "
            "for micro-batches of different lengths"
        ) from error


class AnySizes:
    """`shape`: of the largest batch, which has `micro_batches`. `uneven`: why these cannot have different numbers of
    rows; "" if they can."""

    def __init__(self, model: nn.Module, shape: BatchShape, sizes: BatchSizes, micro_batches: int, uneven: str):
        self.model, self.shape, self.sizes, self.micro_batches, self.uneven = model, shape, sizes, micro_batches, uneven
        self.ranges = sizes.micro_batch(micro_batches)

    def rows(self, batch: Any, needed: Collection[str]) -> int:
        """The number of rows of a batch. Raises `BatchError` where its tensors do not agree on one."""
        if is_listed(batch, self.shape):
            return sum(self.rows(each, needed) for each in batch)
        found: dict[int, str] = {}
        for name, value in self.shape.tensors(self.model, batch, needed).items():
            each = self.shape.entries(name, self.shape.size) // self.shape.size
            length = value.shape[0] if value.dim() else 0
            if not length or length % each:
                raise BatchError(f"batch[{name!r}] has first dimension {length}; it has {each} for each row")
            found[length // each] = name
        if len(found) > 1:
            (a, first), (b, second), *_ = found.items()
            raise BatchError(f"batch[{first!r}] has {a} rows and batch[{second!r}] has {b}; all have the same number")
        return next(iter(found), 0)

    def cut(self, batch: Any, count: int, needed: Collection[str]) -> list[MicroBatch]:
        """The `count` micro-batches of a batch. Raises `BatchError` for one that the programs do not take."""
        if is_listed(batch, self.shape):
            if len(batch) != count:
                raise BatchError(
                    f"the batch is a list of {len(batch)} micro-batches, and {count} make a step; compile with "
                    f"micro_batches={len(batch) * self.micro_batches // count} for {len(batch)}"
                )
            return [self._micro_batch(each, self.rows(each, needed), needed) for each in batch]
        rows, most = self.rows(batch, needed), self.shape.size * count // self.micro_batches
        if not self.sizes.rows and rows != most:
            raise BatchError(
                f"the batch has {rows} rows, compiled for {most}; fill it up, or give the first dimension a name in "
                "dynamic_shapes, too"
            )
        each, more = divmod(rows, count)
        if not each:
            raise BatchError(f"the batch has {rows} rows for {count} micro-batches, each of which needs one or more")
        if more and self.uneven:
            raise BatchError(
                f"the batch has {rows} rows, which {count} micro-batches cannot share evenly, and {self.uneven}; "
                f"hand over {rows - more} rows, or pass loss_weight to compile"
            )
        found, start = [], 0
        for number in range(count):
            size = each + (number < more)
            found.append(self._micro_batch(rows_of(batch, range(start, start + size), rows), size, needed))
            start += size
        return found

    def _micro_batch(self, batch: Any, rows: int, needed: Collection[str]) -> MicroBatch:
        leaves, sizes = self.shape.tensors(self.model, batch, needed), dict[str, int]()
        seen: dict[str, str] = {}
        for name, value in leaves.items():
            most, dims = self.shape.leaves[name][0], self.sizes.dims[name]
            if value.dim() != len(most):
                raise BatchError(f"batch[{name!r}] has {value.dim()} dimensions, compiled for {len(most)}")
            for dim, (size, limit, label) in enumerate(zip(value.shape, most, dims)):
                size = rows if dim == 0 else size
                if label:
                    where = f"batch[{name!r}] dimension {dim}"
                    if sizes.setdefault(label, size) != size:
                        raise BatchError(f"{where}: {label} is {size}, and {sizes[label]} in {seen[label]}")
                    seen.setdefault(label, where)
                elif size != (limit if dim else self.shape.size // self.micro_batches):
                    raise BatchError(
                        f"batch[{name!r}] is {list(value.shape)}, compiled for {self._micro_batch_text(name)}; pad or "
                        "cut it, or name that size in dynamic_shapes"
                    )
        for label, size in sizes.items():
            self._require(label, size, seen[label])
        return MicroBatch(batch, leaves, sizes)

    def _require(self, label: str, size: int, where: str) -> None:
        of = self.ranges[label]
        if size in of:
            return
        if label == self.sizes.rows:
            near = f"hand over at most {self.sizes.ranges[label].most} rows a step"
        elif size > of.most:
            near = f"cut it to {of.most}, or compile with torch.export.Dim({label!r}, max={size})"
        else:
            near = f"pad it to {of.least}, or compile with torch.export.Dim({label!r}, min={size})"
        raise BatchError(f"{where}: {label} is {size} in a micro-batch, compiled for {of.least} to {of.most}; {near}")

    def _micro_batch_text(self, name: str) -> str:
        first, *rest = self.shape.leaves[name][0]
        sizes = (first // self.micro_batches, *rest)
        return f"[{', '.join(label or str(size) for label, size in zip(self.sizes.dims[name], sizes))}] a micro-batch"

    def pad(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Write each input of these micro-batches to its place in one tensor with room for their largest size each."""
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for each in micro_batches for name in each.leaves):
            (first, *rest), dtype = self.shape.leaves[name]
            rows = first // self.micro_batches
            whole = found[name] = torch.zeros(rows * len(micro_batches), *rest, dtype=dtype)
            for number, each in enumerate(micro_batches):
                value = each.leaves[name]
                start = number * rows
                whole[(slice(start, start + len(value)), *map(slice, value.shape[1:]))] = value
        return found
