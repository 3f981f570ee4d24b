"""Choose the CUDA kernel that torch takes for a call of attention, with the bytes that it saves and needs meanwhile.

In: the arguments of a call, as fake tensors. Out: a result of the right shape and layout, whose backward holds what the
real one holds, and calls for the active `KernelCalls` modes. The rules are those of torch's `sdp_utils.cpp` (2.13)
(`can_use_flash_attention`, `can_use_mem_efficient_attention`), sizes are those of `flash_api.cpp`, `attention.cu` and
`attention_backward.cu` beside it. cuDNN's kernel, which torch takes first on an H100, saves the same as flash
attention. GPUs older than Ampere, which lack flash attention, run the efficient kernel, whose bytes differ by the
padding of rows only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ir.machine.call_mix import EFFICIENT, FLASH, AttentionCall
from ...runtime.functions import window_blocks
from ...runtime.functions.document_borders import fits_kernel, side_by_side, split_rows
from ...runtime.stage.saved_classes import EFFICIENT_ROWS
from ..operators.kernels import DTYPES
from ..operators.workspace import attention as workspace
from ..operators.workspace.sizes import round_up
from .call_rows import count_call, count_workspace

MATH = "math"  # products, a softmax and a product
WIDEST = 256  # head size of flash attention
ROWS = 128  # rows are padded to multiples of these in backward


def cuda_backend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """The kernel that torch takes on CUDA."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_known = is_half or query.dtype == torch.float32
    if not is_known or query.dim() != 4 or not (query.dtype == key.dtype == value.dtype):
        return MATH
    width = query.shape[-1]
    same_width = width == key.shape[-1] == value.shape[-1]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    is_square = query.shape[-2] == key.shape[-2]
    if is_half and mask is None and same_width and width <= WIDEST and (is_square or not is_causal):
        return FLASH
    aligned = 8 if is_half else 4
    if same_heads and width == key.shape[-1] and width % aligned == 0 and value.shape[-1] % aligned == 0:
        return EFFICIENT
    return MATH


def cuda_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Has the costs of `scaled_dot_product_attention` on CUDA."""
    query, key, value = _as_autocast(query, key, value)
    backend = cuda_backend(query, key, value, attn_mask, is_causal)
    if backend == MATH:
        math_attention = torch.ops.aten._scaled_dot_product_attention_math
        found: Tensor = math_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return found
    bias = None if attn_mask is None else _bias(attn_mask, query.dtype)
    width = query.shape[-1]
    if backend == FLASH and width % 8:  # narrower heads are padded, and the padded operands saved
        query, key, value = (torch.nn.functional.pad(t, (0, -width % 8)) for t in (query, key, value))
    out: Tensor = _Fused.apply(query, key, value, bias, backend, is_causal, dropout_p)
    return out[..., :width] if backend == FLASH else out


def cuda_window_attention(
    query: Tensor, key: Tensor, value: Tensor, before: int, after: int, dropout_p: float = 0.0,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Has the costs of `functions.window_attention` on CUDA."""
    query, key, value = _as_autocast(query, key, value)
    found: Tensor = _Blockwise.apply(query, key, value, None, before, after)
    return found


def cuda_packed_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, dropout_p: float = 0.0,
    scale: float | None = None, enable_gqa: bool = False, borders: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Has the costs of `functions.packed_attention` on CUDA: the most that they are, wherever documents end."""
    query, key, value = _as_autocast(query, key, value)
    if borders is not None and not dropout_p and fits_kernel(query, key, value):
        rows = len(query)
        return split_rows(_Bordered.apply(*(side_by_side(t) for t in (query, key, value)), borders, rows), rows)
    found: Tensor = _Blockwise.apply(query, key, value, documents, query.shape[-2], 0)
    return found


class _Fused(torch.autograd.Function):
    """Saves operands, output, one fp32 number per row, the numbers that are added to scores, and where draws begin."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, backend: str, causal: bool,
        dropout_p: float,
    ) -> Tensor:  # fmt: skip
        batch, heads, rows, width = query.shape
        ctx.bias_shape = None if bias is None else bias.shape
        if backend == FLASH:
            out, lse = torch.empty_like(query), query.new_empty((batch, heads, rows), dtype=torch.float32)
            if not dropout_p:
                count_workspace(workspace.flash_forward(batch * heads, rows, key.shape[-2], width))
        else:
            out = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
            is_half = query.dtype != torch.float32
            count_workspace(workspace.efficient_forward(batch * heads, rows, value.shape[-1], is_half))
            lse = query.new_empty((batch, heads, round_up(rows, EFFICIENT_ROWS)), dtype=torch.float32)
        draws = torch.empty(3, dtype=torch.int64)  # the generator's seed and offset
        ctx.save_for_backward(query, key, value, out, lse, draws, *([bias] if bias is not None else []))
        ctx.call = AttentionCall(
            backend, DTYPES.get(query.dtype, ""), batch * heads, rows, key.shape[-2], width, causal
        )
        count_call(ctx.call, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count_call(replace(ctx.call, backward=True))
        query, key, value, out = ctx.saved_tensors[:4]
        gradients: list[Tensor | None] = [torch.empty_like(t) for t in (query, key, value)]
        if ctx.call.backend == FLASH:
            _flash_workspace(query, key, value, (out, grads[0]))
            return (*gradients, None, None, None, None)
        batch, heads, rows, width = query.shape
        scores = (batch, heads, rows, key.shape[-2])
        if ctx.needs_input_grad[3]:  # one for each score, then added up over those that the mask is the same for
            gradients.append(query.new_empty(ctx.bias_shape))
            held = None if ctx.bias_shape == scores else query.new_empty(scores)
        else:
            gradients.append(None)
            held = None
        is_half = query.dtype != torch.float32
        sizes = (batch * heads, rows, key.shape[-2], width, value.shape[-1], is_half)
        query.new_empty(workspace.efficient_backward(*sizes), dtype=torch.uint8)
        del held
        return (*gradients, None, None, None)


def _flash_workspace(query: Tensor, key: Tensor, value: Tensor, results: Iterable[Tensor]) -> None:
    """Hold the buffers of flash attention's backward: `mha_bwd` in flash_api.cpp. Results with heads before rows are
    copied, and so is their gradient (`_flash_attention_backward` in attention_backward.cu)."""
    batch, heads, rows, width = query.shape
    padded = round_up(rows, ROWS)
    sums, full = (batch, heads, padded), torch.float32
    held = [result.transpose(1, 2).contiguous() for result in results]
    held.append(query.new_empty(sums, dtype=full))  # each row's sum of output times its gradient
    held.append(query.new_empty((*sums, round_up(width, 32)), dtype=full))  # gradients of queries
    if key.shape[1] != heads:  # gradients of a group's heads, before they are added up
        held += [t.new_empty((batch, heads, *t.shape[2:])) for t in (key, value)]


class _Bordered(torch.autograd.Function):
    """Saves operands, borders, output, one fp32 number for each query, and where draws would begin. Operands are
    [tokens, heads, width]; counted as if each of the `rows` were one document."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, rows: int) -> Tensor:
        tokens, heads, width = query.shape
        out, draws = torch.empty_like(query), torch.empty(2, dtype=torch.uint64)
        lse = query.new_empty((heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, borders, out, lse, draws)
        dtype, length = DTYPES.get(query.dtype, ""), tokens // rows
        ctx.call = AttentionCall(FLASH, dtype, rows * heads, length, length, width, True)
        count_call(ctx.call)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Hold the buffers of `mha_varlen_bwd` in flash_api.cpp: sums and gradients are separate for each document."""
        count_call(replace(ctx.call, backward=True))
        query, key, value, borders, out = ctx.saved_tensors[:5]
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        held = [result.contiguous() for result in (out, grads[0])]
        tokens, heads, width = query.shape
        padded = tokens + ROWS * (len(borders) - 1)
        held.append(query.new_empty((heads, padded), dtype=torch.float32))
        rounded = round_up(width, 32 if width <= 128 else 64)
        held.append(query.new_empty((padded, heads, rounded), dtype=torch.float32))
        if key.shape[1] != heads:
            held += [t.new_empty((tokens, heads, width)) for t in (key, value)]
        return (*gradients, None, None)


class _Blockwise(torch.autograd.Function):
    """Saves its operands; backward computes attention again, block by block, and adds gradients up in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, before: int, after: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, documents)
        heads, dtype = query.shape[0] * query.shape[1], DTYPES.get(query.dtype, "")
        blocks = list(window_blocks(query.shape[-2], key.shape[-2], before, after))
        sizes = [(stop - start, last - first) for start, stop, first, last in blocks]
        ctx.calls = [AttentionCall(EFFICIENT, dtype, heads, rows, seen, query.shape[-1]) for rows, seen in sizes]
        ctx.masks = 1 if documents is None else len(documents)
        ctx.mask_size = ctx.masks * max(rows * seen for rows, seen in sizes)
        mask = _block_mask(query, ctx.mask_size, documents)
        parts = [
            _one_block(
                call, query[..., start:stop, :], key[..., first:last, :], value[..., first:last, :], mask, ctx.masks
            )
            for call, (start, stop, first, last) in zip(ctx.calls, blocks)
        ]
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        del mask, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for call in ctx.calls:
            count_call(call)
            count_call(replace(call, backward=True))
        *operands, documents = ctx.saved_tensors
        sums = [t.new_empty(t.shape, dtype=torch.float32) for t in operands]
        mask = _block_mask(operands[0], ctx.mask_size, documents)
        del mask
        return (*(total.to(t.dtype) for total, t in zip(sums, operands)), None, None, None)


def _block_mask(query: Tensor, size: int, documents: Tensor | None) -> Tensor:
    """Numbers to add, made of booleans where documents differ."""
    hidden = None if documents is None else query.new_empty(size, dtype=torch.bool)
    mask = query.new_empty(size)
    del hidden
    return mask


def _one_block(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, masks: int) -> Tensor:
    """A block's result; each block is a call of its own."""
    if cuda_backend(query, key, value, mask, False) == MATH:
        mask = mask[: masks * call.queries * call.keys].view(masks, 1, call.queries, call.keys)
        is_grouped = query.shape[1] != key.shape[1]
        math_attention = torch.ops.aten._scaled_dot_product_attention_math
        found: Tensor = math_attention(query, key, value, mask, enable_gqa=is_grouped)[0]
        return found
    batch, heads, rows, _ = query.shape
    part = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    count_call(call, part)
    return part


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that are added to scores: a mask of its own for each call, its rows padded to 16 numbers."""
    number = mask if mask.dtype == dtype else torch.zeros_like(mask, dtype=dtype)
    padding = -mask.shape[-1] % 16
    return torch.nn.functional.pad(number, (0, padding)) if padding else number


def _as_autocast(*operands: Tensor) -> list[Tensor]:
    """Operands as autocast casts them: plans are made on CPU tensors."""
    if not torch.is_autocast_enabled("cpu"):
        return list(operands)
    return [t.to(torch.get_autocast_dtype("cpu")) for t in operands]
