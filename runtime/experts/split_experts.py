"""Experts in parts: each part multiplies the rows of its own experts, and all parts together give every row.

Rows (a token for one of its experts) are sorted by expert; `offsets` has the place after the last row of each expert,
int32. How many rows a part has is known on the device only, so a part works on tensors of all rows with its own first:
shapes do not depend on the routing, and the host waits for nothing. Rows of other parts cost no product, are zeros in
its results, and give no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_names import grouped_mm


def part_rows(rows: Tensor, offsets: Tensor, begin: int) -> Tensor:
    """The same rows, those of expert `begin` first and those before it last."""
    if begin == 0:
        return rows
    found: Tensor = _Turned.apply(rows, offsets[begin - 1])
    return found


def part_offsets(offsets: Tensor, begin: int, end: int) -> Tensor:
    """The ends of the rows of the experts from `begin` to before `end`, after `part_rows`."""
    own = offsets[begin:end]
    return own if begin == 0 else own - offsets[begin - 1]


def part_product(rows: Tensor, weight: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """Each expert's rows times its matrix of `weight` [experts of the part, in, out]: [rows, out], with zeros after the
    part's rows. `experts`: the number of all experts; a plan counts them with equally many rows."""
    found: Tensor = _PartProduct.apply(rows, weight, offsets)
    return found


def join_part(found: Tensor | None, part: Tensor, offsets: Tensor, begin: int, end: int) -> Tensor:
    """`found` with a part's results in the places of the rows of experts from `begin` to before `end`."""
    place = _places(part, offsets)
    is_own = place < offsets[end - 1]
    if begin:
        start = offsets[begin - 1]
        part, is_own = _Turned.apply(part, -start), is_own & (place >= start)
    is_own = is_own.view(-1, *[1] * (part.dim() - 1))
    return torch.where(is_own, part, 0.0 if found is None else found)


def member_rows(rows: Tensor, offsets: Tensor, member: Tensor, members: int) -> Tensor:
    """The same rows, those of a team's member's experts first. `member`: its number of `members`, [1]."""
    found: Tensor = _Turned.apply(rows, _member_start(offsets, member, members))
    return found


def member_offsets(offsets: Tensor, member: Tensor, members: int) -> Tensor:
    """The end of the rows of each of a member's experts, after `member_rows`."""
    own = offsets.view(members, -1).index_select(0, member).squeeze(0)
    return own - _member_start(offsets, member, members)


def member_result(part: Tensor, offsets: Tensor, member: Tensor, members: int) -> Tensor:
    """A member's results in the places of its experts' rows, and zeros in those of others."""
    start, place = _member_start(offsets, member, members), _places(part, offsets)
    stop = offsets.view(members, -1)[:, -1].index_select(0, member)
    is_own = ((place >= start) & (place < stop)).view(-1, *[1] * (part.dim() - 1))
    return torch.where(is_own, _Turned.apply(part, -start), 0.0)


def _member_start(offsets: Tensor, member: Tensor, members: int) -> Tensor:
    """The place of the first row of a member's experts, [1]."""
    ends = offsets.view(members, -1)[:, -1]
    return torch.where(member > 0, ends.index_select(0, (member - 1).clamp(min=0)), 0)


def _places(rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device)


def rows_after(rows: Tensor, offsets: Tensor) -> Tensor:
    """The rows after the last expert's, as a column of truth values."""
    return (_places(rows, offsets) >= offsets[-1]).unsqueeze(-1)


class _Turned(torch.autograd.Function):
    """Row i of the result is row i + start, counted around."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: Tensor) -> Tensor:
        ctx.save_for_backward(start)
        return _turn(rows, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (start,) = ctx.saved_tensors
        return _turn(grads[0], -start), None


def _turn(rows: Tensor, start: Tensor) -> Tensor:
    return rows.index_select(0, (_places(rows, start) + start) % rows.shape[0])


class _PartProduct(torch.autograd.Function):
    """A product in groups, with zeros where torch's leaves rows after the last group as memory was."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, offsets)  # frozen weights need no rows
        return grouped_mm(rows, weight, offs=offsets).masked_fill_(rows_after(rows, offsets), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, offsets = ctx.saved_tensors
        grad, of_rows, of_weight = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(grad, weight.transpose(-2, -1), offs=offsets)
            of_rows.masked_fill_(rows_after(grad, offsets), 0.0)
        if ctx.needs_input_grad[1]:
            if weight.stride(-1) == 1:
                of_weight = grouped_mm(rows.t(), grad, offs=offsets)
            else:  # a transposed parameter, which its gradient is laid out like
                of_weight = grouped_mm(grad.t(), rows, offs=offsets).transpose(-2, -1)
        return of_rows, of_weight, None
