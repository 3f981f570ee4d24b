"""Tensors as the bytes that they are, so that no precision ever casts them: a quantised weight means what it is."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8, where that is possible; the last dimension grows by the size of an element."""
    plain = tensor.detach().contiguous()
    return (plain if plain.dim() else plain.reshape(1)).view(torch.uint8)


def tensor_from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes these are; a copy where they begin between two of its elements."""
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
