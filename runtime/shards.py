"""How a tensor is spread over the members of a group: read as one row, in equal pieces, zeros filling the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def piece_of(tensor: Tensor, index: int, count: int) -> Tensor:
    """A copy of the piece of member `index` of `count`: one row of ceil(numel / count) elements."""
    length = -(-tensor.numel() // count)
    piece = tensor.new_zeros(length)
    own = tensor.reshape(-1)[index * length : (index + 1) * length]
    piece[: own.numel()] = own
    return piece


def whole_of(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The tensor of this shape out of all members' pieces, copied."""
    size = torch.Size(shape)
    return torch.cat([piece.reshape(-1) for piece in pieces])[: size.numel()].reshape(size)
