"""How a tensor is spread over the members of a group: read as one row, in equal pieces, zeros filling the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .arena import weights_layout
from .program import StageSpec


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


def gathered(flats: Sequence[Tensor], part: StageSpec, into: Mapping[str, Tensor]) -> None:
    """Fill a stage's whole tensors `into` from the flat buffers of all members, each laid out as its shard `part`."""
    layout = weights_layout(part)
    members = [layout.views(flat) for flat in flats]
    for name, whole in into.items():
        length, row = members[0][name].numel(), whole.view(-1)
        for index, pieces in enumerate(members):
            own = row[index * length : (index + 1) * length]
            own.copy_(pieces[name][: own.numel()])


def packed(grads: Mapping[str, Tensor], count: int) -> dict[torch.dtype, tuple[Tensor, list[str]]]:
    """Gradients by dtype: one row for each of `count` members, with the pieces that are its own, and their names."""
    found = {}
    for dtype in sorted({g.dtype for g in grads.values()}, key=str):
        names = [name for name, g in grads.items() if g.dtype == dtype]
        rows = [torch.cat([piece_of(grads[name], index, count) for name in names]) for index in range(count)]
        found[dtype] = (torch.stack(rows), names)
    return found


def unpacked(row: Tensor, names: Sequence[str], part: StageSpec) -> dict[str, Tensor]:
    """One member's pieces out of its row."""
    lengths = {param.name: param.numel for param in part.params}
    return dict(zip(names, row.split([lengths[name] for name in names])))
