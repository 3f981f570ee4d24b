"""The sizes of a batch that differ from step to step, by name."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ...ir.program import SizeRange, Sizes


class BatchSizes(BaseModel):
    """`ranges`: of a whole batch, by name; `rows`: the name of its number of rows, "" where that is fixed. `dims`: for
    each dimension of each input its size's name, "" where it is fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ranges: dict[str, SizeRange]
    rows: str
    dims: dict[str, tuple[str, ...]]

    def micro_batch(self, micro_batches: int) -> dict[str, SizeRange]:
        """The range of each size of a micro-batch."""
        found = dict(self.ranges)
        if self.rows:
            found[self.rows] = SizeRange(1, max(self.ranges[self.rows].most // micro_batches, 1))
        return found

    def micro_batch_of(self, tensors: Mapping[str, Tensor], micro_batches: int) -> Sizes:
        """The sizes of a micro-batch of the batch of these tensors."""
        found = {size: t.shape[dim] for name, t in tensors.items() for dim, size in enumerate(self.dims[name]) if size}
        if self.rows:
            found[self.rows] //= micro_batches
        return found
