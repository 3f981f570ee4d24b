"""Functions that run on fake tensors in place of calls whose costs fake tensors do not show.

In: the arguments of the call. Out: a result of the right shape, whose backward saves what the real kernel saves, and
calls for the active `KernelCalls` modes. There are stand-ins for CUDA's attention (`attention.py`), quantised weights
(`quantised.py`) and dropout on a machine without CUDA, for matrix products in groups, whose FLOPs torch does not know,
nor their shapes unless they are bf16, for the CTC loss, which has no shape rule, and for losses in chunks, of which a
few show the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir.machine.call_mix import Product
from ...ir.program import aligned
from ...runtime.experts.split_experts import rows_after
from ...runtime.functions import (
    attend_block,
    chunked_cross_entropy,
    linear_4bit,
    linear_8bit,
    linear_packed,
    packed_attention,
    part_product,
    part_statistics,
    window_attention,
)
from ...runtime.functions.chunked_loss import slices
from ...runtime.quantised.linear_packed import GPU_PIECE, Packing, apply_packing
from ...runtime.torch_names import grouped_mm
from ..operators.kernels import DTYPES
from .attention import cuda_attention, cuda_packed_attention, cuda_window_attention
from .call_rows import count_call
from .quantised import cuda_linear_4bit, cuda_linear_8bit


def cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if p > 0 and training else input


ROW_BYTES = 16  # rows of a product in groups begin at multiples of these


class _GroupedProduct(torch.autograd.Function):
    """Multiplies each group of rows of `a` by its own matrix of `b`; the groups end at `offsets`. `groups`: the number
    of groups of all rows, where `b` has some of them; then there are zeros for rows of others."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype | None, groups: int = 0) -> Tensor:
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(a if wanted[1] else None, b if wanted[0] else None, offsets)
        ctx.looks = [(t.shape, t.stride(), t.dtype) for t in (a, b)]
        ctx.call, ctx.is_part = _group_product(a, b, groups or b.shape[0]), groups not in (0, b.shape[0])
        dtype = dtype or a.dtype
        rows, width = a.shape[0], b.shape[-1]
        pitch = aligned(width * dtype.itemsize, ROW_BYTES) // dtype.itemsize
        out = a.new_empty_strided((rows, width), (pitch, 1), dtype=dtype)  # no view: models change it in place
        count_call(ctx.call, out)
        if groups:  # after the call, which then is not kept: what is kept is what the call made
            out.masked_fill_(rows_after(a, offsets), 0.0)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, _, offsets = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        for _ in range(wanted[0] + wanted[1]):
            count_call(ctx.call)
        of_a, of_b = (
            grads[0].new_empty_strided(shape, stride, dtype=dtype) if needed else None
            for (shape, stride, dtype), needed in zip(ctx.looks, wanted)
        )
        if of_a is not None and ctx.is_part:
            of_a.masked_fill_(rows_after(of_a, offsets), 0.0)
        return of_a, of_b, None, None, None


def _group_product(a: Tensor, b: Tensor, groups: int) -> Product:
    """The product of the groups of `b`, with the FLOPs that their rows have where all `groups` have the same number;
    each group's rows meet a matrix of their own."""
    own, rows = b.shape[0], a.shape[0]
    if rows % groups:
        return Product(DTYPES.get(a.dtype, ""), -(-rows * own // groups), b.shape[-1], a.shape[1])
    return Product(DTYPES.get(a.dtype, ""), rows // groups, b.shape[-1], a.shape[1], own)


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if offs is None or a.dim() != 2 or b.dim() != 3 or bias is not None:
        return grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    out: Tensor = _GroupedProduct.apply(a, b, offs, out_dtype)
    return out


def part_of_product(rows: Tensor, weight: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """`part_product`, whose rows are those of a part of the experts."""
    out: Tensor = _GroupedProduct.apply(rows, weight, offsets, None, experts)
    return out


def grouped_shape(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """The same product's shape and dtype on fake tensors: torch's own shape rule takes bf16 only."""
    return grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), **options).to(a.dtype)


def part_shape(rows: Tensor, weight: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """The shape and dtype of `part_product` on fake tensors."""
    return grouped_shape(rows, weight, offs=offsets)


class _ShapePacking(Packing):
    """Products by experts' matrices that show their shapes: all matrices are unpacked at once."""

    def multiply_experts(self, rows: Tensor, offsets: Tensor, parts: Sequence[Tensor], *, is_backward: bool) -> Tensor:
        matrices = self.unpack(parts, rows.dtype)
        return grouped_shape(rows, matrices if is_backward else matrices.transpose(-2, -1), offs=offsets)


class _CountedPacking(Packing):
    """Products by experts' matrices, of which the unpacking and each group's product count."""

    def product(self, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = _GroupedProduct.apply(rows, matrices, offsets, None, self.experts)
        return out


def once(times: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class _CudaPacking(_CountedPacking):
    """On a GPU the calls that unpack a piece count, too, once for each piece."""

    repeat: Callable[[int], AbstractContextManager[None]] = once  # counts what is called within it this often

    def unpack(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        found = super().unpack(parts, dtype)
        with self.repeat(-(-math.prod(self.shape) // min(GPU_PIECE, math.prod(self.shape[-2:])))):
            self.unpack_piece(parts, GPU_PIECE)
        return found


def linear_by(kind: type[Packing]) -> Callable[..., Tensor]:
    """`linear_packed` by a kind of `Packing`."""

    def call(input: Tensor, bias: Tensor | None, *parts: Tensor, offsets: Tensor | None = None, **form: Any) -> Tensor:
        return apply_packing(input, bias, parts, offsets, kind(**form))

    return call


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Has the shapes of `F.ctc_loss`, whose kernels read the lengths of the rows, and joins the rows as that does."""
    losses = -log_probs.logsumexp(-1).sum(0)
    return {"none": losses, "mean": losses.mean(), "sum": losses.sum()}[reduction]


def ends(total: int, size: int) -> Iterator[slice]:
    """The first and the last piece: all others are like the first."""
    first, *others = slices(total, size)
    return iter((first, *others[-1:]))


# Functions to run on fake tensors in place of torch's own, whose rule for fake tensors is narrower than its kernels.
SHAPE_RULES: dict[Any, Any] = {
    grouped_mm: grouped_shape,
    part_product: part_shape,
    linear_packed: linear_by(_ShapePacking),
    torch.nn.functional.ctc_loss: ctc_loss,
    chunked_cross_entropy: partial(chunked_cross_entropy, pieces=ends),
    part_statistics: partial(part_statistics, pieces=ends),
    attend_block: partial(attend_block, some=lambda tiles: tiles[:1]),
}
STAND_INS: dict[Any, Any] = {
    grouped_mm: grouped_product,
    part_product: part_of_product,
    linear_packed: linear_by(_CountedPacking),
    torch.nn.functional.ctc_loss: ctc_loss,
}
CUDA_STAND_INS: dict[Any, Any] = {
    **STAND_INS,
    torch.nn.functional.scaled_dot_product_attention: cuda_attention,
    window_attention: cuda_window_attention,
    packed_attention: cuda_packed_attention,
    torch.nn.functional.dropout: cuda_dropout,
    linear_4bit: cuda_linear_4bit,
    linear_8bit: cuda_linear_8bit,
    linear_packed: linear_by(_CudaPacking),
}
