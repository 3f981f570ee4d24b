"""An input of a program that no batch has: a prologue (`prologue/`) makes it of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MadeInput:
    """An input of a program that a prologue makes. `dim`: the dimension of its rows, which is the first one of the
    input; None for a `value` that is the same for all micro-batches, and so no input but a constant. `places`: its
    numbers are places in tensors of a micro-batch, of which a whole batch has this number."""

    name: str
    dim: int | None = 0
    value: Tensor | None = None
    places: int = 0

    def is_made_of(self, whole: Tensor, parts: Sequence[Tensor], total: int) -> bool:
        """Whether the tensor of a batch has the rows of its parts, of which a whole batch has `total`."""
        if self.dim is None:
            return all(torch.equal(part, whole) for part in parts)
        if self.places:
            parts = [part + i * (self.places // total) for i, part in enumerate(parts)]
        others = [[size for d, size in enumerate(t.shape) if d != self.dim] for t in (whole, *parts)]
        return others.count(others[0]) == len(others) and torch.equal(torch.cat([*parts], self.dim), whole)
