"""What the user's words "fp32", "bf16" and "fp16" mean. Plans and settings keep the word, code reads the facts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

MASTER_BYTES = 4  # of one parameter in fp32


@dataclass(frozen=True)
class Precision:
    """The types of a step's numbers. `scales_loss`: gradients overflow or vanish unless the loss is scaled, so that an
    update counts only where the norm of all gradients is finite."""

    dtype: torch.dtype  # in which a step computes
    scales_loss: bool = False

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The type of autocast, weights and gradients; None in fp32, which leaves a model's own types as they are."""
        return None if self.dtype == torch.float32 else self.dtype

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of the weights."""
        return self.low_dtype is not None

    @property
    def master_bytes(self) -> int:
        """Bytes of the master of one trained parameter; 0 without masters."""
        return MASTER_BYTES if self.has_masters else 0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which a model computes on this device."""
        return torch.autocast(device.type, self.low_dtype) if self.low_dtype is not None else nullcontext()


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, scales_loss=True),
}
