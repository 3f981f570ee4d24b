"""Functions that run on fake tensors in place of calls whose costs fake tensors do not show.

In: the arguments of the call. Out: a result of the right shape, whose backward saves what the real kernel saves, and
calls for the active `KernelCalls` modes. There are stand-ins for CUDA's fused attention and dropout on a machine
without CUDA, for matrix products in groups, whose FLOPs torch does not know, nor their shapes unless they are bf16, and
for the CTC loss, which has no shape rule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...ir.machine.call_mix import EFFICIENT, FLASH, AttentionCall, Product
from .call_rows import DTYPES


class KernelCalls:
    """A dispatch mode that counts calls and their FLOPs."""

    def kernel(self, call: Product | AttentionCall) -> None:
        raise NotImplementedError


def _count(call: Product | AttentionCall) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, KernelCalls):
            mode.kernel(call)


class _Attention(torch.autograd.Function):
    """Fused attention: saves its operands, its output and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows, *([mask] if mask is not None else []))
        ctx.is_causal, ctx.masked = is_causal, mask is not None
        _count(_attention_call(query, key, is_causal, mask is not None))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        _count(_attention_call(query, key, ctx.is_causal, ctx.masked, backward=True))
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _attention_call(query: Tensor, key: Tensor, causal: bool, masked: bool, backward: bool = False) -> AttentionCall:
    """A call of CUDA's flash attention, or of its memory-efficient one, which also takes masks and fp32."""
    flash = not masked and query.dtype in (torch.bfloat16, torch.float16)
    return AttentionCall(
        FLASH if flash else EFFICIENT, DTYPES.get(query.dtype, ""), math.prod(query.shape[:-2]), query.shape[-2],
        key.shape[-2], query.shape[-1], causal, backward,
    )  # fmt: skip


def cuda_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal)
    return out


def cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if p > 0 and training else input


class _GroupedProduct(torch.autograd.Function):
    """Multiplies each group of rows of `a` by its own matrix of `b`; the groups end at `offsets`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(a, b, offsets)
        _count(_group_product(a, b))
        return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype or a.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        for _ in range(wanted[0] + wanted[1]):
            _count(_group_product(a, b))
        return torch.empty_like(a) if wanted[0] else None, torch.empty_like(b) if wanted[1] else None, None, None


def _group_product(a: Tensor, b: Tensor) -> Product:
    """The product of all groups, with the FLOPs that its rows have; each group's rows meet a matrix of their own."""
    groups, rows = b.shape[0], a.shape[0]
    if rows % groups:
        return Product(DTYPES.get(a.dtype, ""), rows, b.shape[-1], a.shape[1])
    return Product(DTYPES.get(a.dtype, ""), rows // groups, b.shape[-1], a.shape[1], groups)


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if offs is None or a.dim() != 2 or b.dim() != 3 or bias is not None:
        return torch._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    out: Tensor = _GroupedProduct.apply(a, b, offs, out_dtype)
    return out


def grouped_shape(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """The same product's shape and dtype on fake tensors: torch's own shape rule takes bf16 only."""
    return torch._grouped_mm(a.to(torch.bfloat16), b.to(torch.bfloat16), **options).to(a.dtype)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Has the shapes of `F.ctc_loss`, whose own kernels read the lengths of the rows."""
    losses = -log_probs.logsumexp(-1).sum(0)
    return losses if reduction == "none" else losses.mean()


# Functions to run on fake tensors in place of torch's own, whose rule for fake tensors is narrower than its kernels.
SHAPE_RULES: dict[Any, Any] = {torch._grouped_mm: grouped_shape, torch.nn.functional.ctc_loss: ctc_loss}
STAND_INS: dict[Any, Any] = {torch._grouped_mm: grouped_product, torch.nn.functional.ctc_loss: ctc_loss}
CUDA_STAND_INS: dict[Any, Any] = {
    **STAND_INS,
    torch.nn.functional.scaled_dot_product_attention: cuda_attention,
    torch.nn.functional.dropout: cuda_dropout,
}
