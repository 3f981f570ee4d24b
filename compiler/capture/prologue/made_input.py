"""An input of a program that no batch has: a prologue (`prologue/`) makes it of each batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class MadeInput:
    """An input of a program that a prologue makes. `dim`: the dimension of its rows, which is the first one of the
    input; None for a `value` that is the same for all micro-batches, and so no input but a constant."""

    name: str
    dim: int | None
    value: torch.Tensor | None
