"""The rows of a mix that the cost model counts operators as: products and attention, by their shapes."""

from __future__ import annotations

import torch

from ...ir.machine.call_mix import FLASH, FP8, AttentionCall, Product
from .record import OperatorCall

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), FP8)


def one_product(call: OperatorCall) -> tuple[Product]:
    """The product of its last two operands, perhaps into a tensor that it is given."""
    *_, left, right = (operand for operand in call.tensors() if operand is not call.given.get("out"))
    *batch, m, k = left.shape
    return (Product(DTYPES.get(left.dtype, ""), m, right.shape[-1], k, batch[0] if batch else 1),)


def scaled_product(call: OperatorCall) -> tuple[Product]:
    """A product of operands that have scales."""
    (m, k), n = call.tensor("self").shape, call.tensor("mat2").shape[1]
    return (Product(DTYPES.get(call.tensor("self").dtype, ""), m, n, k),)


def cpu_attention(call: OperatorCall) -> tuple[AttentionCall]:
    """The CPU's kernel, which takes every dtype, with a mask or without."""
    rows, heads, length, width = call.tensor("query").shape
    keys, dtype = call.tensor("key").shape[-2], DTYPES.get(call.tensor("query").dtype, "")
    is_backward = "grad_out" in call.given
    return (AttentionCall(FLASH, dtype, rows * heads, length, keys, width, bool(call["is_causal"]), is_backward),)


def no_kernel(call: OperatorCall) -> tuple[()]:
    """A call that only takes memory."""
    return ()
