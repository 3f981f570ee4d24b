"""How a tensor is spread over the members of a group: flattened, in equal pieces, the last one filled up with zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir.program import StageSpec
from .arena import weights_layout


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


def gathered(rows: Tensor, part: StageSpec, whole: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Copies (target, source) that fill a stage's tensors from the flat shards of all members, one in each of `rows`
    (uint8), laid out as `part`."""
    copies = []
    for place in weights_layout(part).places:
        pieces = rows[:, place.offset_bytes : place.offset_bytes + place.size_bytes].view(place.dtype)
        pairs, _ = _row_pairs(pieces, whole[place.name].view(-1))
        copies += [(flat, row) for row, flat in pairs]
    return copies


def _row_pairs(pieces: Tensor, flat: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Pairs of views on corresponding elements, one of a tensor's `pieces` (members, length) and one of the `flat`
    tensor; and views of those parts of the pieces that lie beyond the tensor's end."""
    length, numel = pieces.shape[1], flat.numel()
    full, rest = divmod(numel, max(1, length))
    pairs = [(pieces[:full], flat[: full * length].view(full, length))] if full else []
    beyond = []
    if rest:
        pairs.append((pieces[full, :rest], flat[full * length :]))
        beyond.append(pieces[full, rest:])
    if full + bool(rest) < len(pieces):
        beyond.append(pieces[full + bool(rest) :])
    return pairs, beyond


@dataclass(frozen=True)
class GradientRows:
    """A stage's gradients of one dtype, on their way to the shards. `rows` (members + 1, n): per member its own pieces
    side by side, and room for one more row; `pieces`: per parameter its columns of `rows`; `own` (n): the place of this
    member's pieces once they are summed."""

    rows: Tensor
    pieces: dict[str, Tensor]
    own: Tensor

    def pack(self, grads: Mapping[str, Tensor]) -> None:
        for name, pieces in self.pieces.items():
            pairs, beyond = _row_pairs(pieces, grads[name].reshape(-1))
            for row, flat in pairs:
                row.copy_(flat)
            for row in beyond:
                row.zero_()

    def named(self) -> dict[str, Tensor]:
        """This member's pieces by name."""
        lengths = [pieces.shape[1] for pieces in self.pieces.values()]
        return dict(zip(self.pieces, self.own.split(lengths)))


def blocks_of(
    grads: Mapping[str, Tensor], part: StageSpec, count: int, staging: Tensor, own: Tensor
) -> list[GradientRows]:
    """One block per dtype of these gradients, for `count` members. The blocks' rows lie in `staging`, their sums in
    `own` (both uint8; `staging` is `count` + 1 times as long as the pieces, `own` as long as they are)."""
    found, start = [], 0
    dtypes = sorted({g.dtype for g in grads.values()}, key=lambda dtype: (-dtype.itemsize, str(dtype)))  # stay aligned
    for dtype in dtypes:
        numels = {p.name: p.numel for p in part.params if p.name in grads and grads[p.name].dtype == dtype}
        size, end = dtype.itemsize, start + sum(numels.values()) * dtype.itemsize
        rows = staging[(count + 1) * start : (count + 1) * end].view(dtype).view(count + 1, (end - start) // size)
        columns = rows[:count].split(list(numels.values()), dim=1)
        found.append(GradientRows(rows, dict(zip(numels, columns)), own[start:end].view(dtype)))
        start = end
    return found
