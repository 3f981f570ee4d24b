"""Products of quantised weights as bitsandbytes has them on CUDA; fake tensors do not show them.

Each runs as one call of the library, so none of its results can be a class of saved tensors. Of 8 bits the input is
quantised too, but for columns with a value above a threshold (LLM.int8(), section 3.2): these are multiplied in 16
bits. The number of such columns is known when the product runs only; it counts here as `OUTLIERS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.machine.call_mix import Product
from ...runtime.functions import linear_4bit
from ...runtime.quantised.linear_4bit import Format4bit, Linear4bit, is_fusible
from ...runtime.quantised.linear_8bit import Linear8bit
from ..operators.kernels import DTYPES
from .call_rows import count_call

# Of the columns. The paper's table 4 finds 7 columns of models of up to 13 B parameters, 0.1 % of the width.
OUTLIERS = 1 / 16


def cuda_linear_4bit(
    input: Tensor, weight: Tensor, absmax: Tensor, bias: Tensor | None = None, *nested: Tensor | None,
    compute_dtype: torch.dtype | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """`functions.linear_4bit`, by the library's own product where that may be fused."""
    if not is_fusible(input):
        return linear_4bit(input, weight, absmax, bias, *nested, compute_dtype=compute_dtype, **more)
    by_name = [more.pop(name, None) for name in ("nested_absmax", "nested_quant_map", "nested_offset")]
    rows = input.to(compute_dtype or input.dtype)
    given = bias if bias is None else bias.to(rows.dtype)
    found = _CudaLinear4bit.apply(rows, weight, absmax, given, *(nested or by_name), Format4bit(**more))
    return found.to(input.dtype)  # type: ignore[no-any-return]


class _CudaLinear4bit(Linear4bit):
    """It counts the unpacked weight, which some cards have no fused product for."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, absmax: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *nested, form = rest
        ctx.form, ctx.bias, ctx.is_unpacked = form, None if bias is None else (bias.shape, bias.dtype), False
        ctx.save_for_backward(weight, absmax, *nested)
        plain = form.unpack(weight, absmax, nested, input.dtype)
        found = input.new_empty((*input.shape[:-1], plain.shape[0]))
        _count_product(input, plain)
        return found if bias is None else found.add_(bias)


def cuda_linear_8bit(
    input: Tensor, weight: Tensor, scb: Tensor, bias: Tensor | None = None, *, threshold: float = 0.0,
    training: bool = True,
) -> Tensor:  # fmt: skip
    """`functions.linear_8bit` with the buffers that the library takes. Its forward unpacks no weight."""
    given = bias if bias is None else bias.to(input.dtype)
    found: Tensor = _CudaLinear8bit.apply(input, weight, scb, given, threshold, training)
    return found


class _CudaLinear8bit(Linear8bit):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, scb: Tensor, bias: Tensor | None, threshold: float, training: bool
    ) -> Tensor:
        ctx.dtype, ctx.bias, ctx.is_unpacked = input.dtype, None if bias is None else (bias.shape, bias.dtype), False
        ctx.save_for_backward(weight, scb)
        found = _product(input.reshape(-1, input.shape[-1]), weight, threshold > 0)
        _count_product(input, weight)
        return (found if bias is None else found.add_(bias)).view(*input.shape[:-1], weight.shape[0])


def _count_product(input: Tensor, weight: Tensor) -> None:
    (wide, width), rows = weight.shape, input.numel() // input.shape[-1]
    count_call(Product(DTYPES.get(input.dtype, ""), rows, wide, width))


def _product(rows: Tensor, weight: Tensor, has_outliers: bool) -> Tensor:
    """The library's steps: quantise the input, cut out outliers, multiply in int32, unpack, and add these."""
    quantised = _quantised_rows(rows, has_outliers)
    count = round(OUTLIERS * rows.shape[1]) if has_outliers else 0
    columns = rows[:, :count].clone(), _plain_columns(weight[:, :count].clone(), rows.dtype)
    total = _small_product(quantised, weight.shape[0], rows.dtype)
    if count:
        count_call(Product(DTYPES.get(rows.dtype, ""), len(rows), weight.shape[0], count))
        total.add_(1.0)
    del columns
    return total


def _quantised_rows(rows: Tensor, has_outliers: bool) -> Tensor:
    half = rows.to(torch.float16)
    quantised = torch.empty_like(half, dtype=torch.int8)
    if has_outliers:
        half.abs().ge(0.0)
    return quantised


def _plain_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    plain = columns * torch.empty((len(columns), 1), dtype=torch.float32, device=columns.device)
    return plain.mul(1.0).to(dtype)


def _small_product(quantised: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    whole = quantised.new_empty((len(quantised), width), dtype=torch.int32)
    return torch.empty_like(whole, dtype=torch.float16).to(dtype)
