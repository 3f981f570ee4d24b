"""The gradient of a bias beside a quantised weight."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_of_bias(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The sum over all rows, added up in the bias's own type as bitsandbytes does."""
    return grad.reshape(-1, shape[-1]).sum(0, dtype=dtype)
