"""`functions.linear_8bit`: bitsandbytes' linear layer with int8 weights, LLM.int8()."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_names import FakeTensor
from .bias import gradient_of_bias
from .libraries import bitsandbytes
from .pieces import empty_weight, keeps_weights_on, lending
from .raw_bytes import tensor_from_bytes


def linear_8bit(
    input: Tensor, weight: Tensor, scb: Tensor, bias: Tensor | None = None, *, threshold: float = 0.0,
    training: bool = True,
) -> Tensor:  # fmt: skip
    """`bitsandbytes.nn.Linear8bitLt` without 16-bit weights. `scb`: the largest of each row of the weight before it was
    quantised, fp32. What exceeds `threshold` in the input is multiplied in 16 bits.

    While training on a CPU the library multiplies with the unpacked weight, and so does this; backward always does. It
    takes the weight that forward unpacked where `keep_unpacked_weights` says so.
    """
    if has_torch_function((input,)):
        found: Tensor = handle_torch_function(
            linear_8bit, (input,), input, weight, scb, bias, threshold=threshold, training=training
        )
        return found
    given = bias if bias is None else bias.to(input.dtype)
    found = Linear8bit.apply(input, weight, scb, given, threshold, training)
    return found


class Linear8bit(torch.autograd.Function):
    """`linear_8bit` for autograd."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, scb: Tensor, bias: Tensor | None, threshold: float, training: bool
    ) -> Tensor:
        ctx.dtype, ctx.bias = input.dtype, None if bias is None else (bias.shape, bias.dtype)
        ctx.is_unpacked = keeps_weights_on() == "cpu" and training and ctx.needs_input_grad[0]
        if ctx.is_unpacked:
            with lending(None):
                kept = _unpack(weight, scb, input.dtype)
            ctx.save_for_backward(kept)
            return F.linear(input, kept, bias)
        ctx.save_for_backward(weight, scb)
        if (training and not input.is_cuda) or isinstance(input, FakeTensor):  # CUDA's is in `graph/kernels/`
            return F.linear(input, _unpack(weight, scb, input.dtype), bias)
        library = bitsandbytes()
        packed = tensor_from_bytes(weight, torch.int8)
        state = library.MatmulLtState(CB=packed, SCB=tensor_from_bytes(scb, torch.float32))
        state.threshold, state.has_fp16_weights, state.is_training = threshold, False, training
        state.use_pool = threshold > 0
        product: Tensor = library.matmul(input, packed, bias=bias, state=state)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            if ctx.is_unpacked:
                (plain,) = ctx.saved_tensors
            else:
                weight, scb = ctx.saved_tensors
                plain = _unpack(weight, scb, ctx.dtype)
            rows = grad.reshape(-1, grad.shape[-1]).contiguous().to(ctx.dtype)
            of_input = torch.matmul(rows, plain).view(*grad.shape[:-1], plain.shape[1])
        if ctx.needs_input_grad[3]:
            of_bias = gradient_of_bias(grad, *ctx.bias)
        return of_input, None, None, of_bias, None, None


def _unpack(weight: Tensor, scb: Tensor, dtype: torch.dtype) -> Tensor:
    """As the library writes it; it has no function for it."""
    rows = tensor_from_bytes(scb, torch.float32).unsqueeze(1).mul(1.0 / 127.0)
    return empty_weight(weight, weight.shape, dtype).copy_(tensor_from_bytes(weight, torch.int8)).mul_(rows)
