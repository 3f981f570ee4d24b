"""`functions.linear_4bit`: bitsandbytes' linear layer with NF4 or FP4 weights, of packed bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_names import FakeTensor
from .bias import gradient_of_bias
from .libraries import bitsandbytes
from .pieces import empty_weight, fake_weight, is_on_host, keeps_weights_on, lending, row_pieces
from .raw_bytes import tensor_from_bytes

NESTED_BLOCKSIZE = 256  # the only one whose products bitsandbytes has
FUSED_ROWS = 1536  # of an input: for more, bitsandbytes unpacks the weight and multiplies, on every GPU


@dataclass(frozen=True)
class Format4bit:
    """The packed form of a weight of this shape; `dtype`: its type before, which the library unpacks it to."""

    shape: Sequence[int]
    blocksize: int
    quant_type: str
    dtype: torch.dtype

    def state(self, absmax: Tensor, nested: Sequence[Tensor | None]) -> Any:
        """The library's own description of the weight, of which these are the bytes."""
        kind = bitsandbytes().functional.QuantState
        nested_absmax, nested_quant_map, nested_offset = nested
        common = {"shape": torch.Size(self.shape), "blocksize": self.blocksize, "quant_type": self.quant_type}
        common["dtype"] = self.dtype
        if nested_absmax is None or nested_quant_map is None or nested_offset is None:
            return kind(tensor_from_bytes(absmax, torch.float32), **common)
        outer = kind(
            tensor_from_bytes(nested_absmax, torch.float32),
            code=tensor_from_bytes(nested_quant_map, torch.float32),
            blocksize=NESTED_BLOCKSIZE,
            dtype=torch.float32,
        )
        return kind(absmax, offset=tensor_from_bytes(nested_offset, torch.float32).reshape(()), state2=outer, **common)

    def unpack(self, weight: Tensor, absmax: Tensor, nested: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The weight, cast to `dtype`; the next weight may get the same memory."""
        if isinstance(weight, FakeTensor):
            return self._unpack_fake(weight, absmax, nested).to(dtype)
        dequantize = bitsandbytes().functional.dequantize_4bit
        if not is_on_host(weight):
            whole: Tensor = dequantize(weight, self.state(absmax, nested))
            return whole.to(dtype)
        (_, width), outer = self.shape, 1 if nested[0] is None else NESTED_BLOCKSIZE
        absmax_bytes = absmax.numel() // -(-math.prod(self.shape) // self.blocksize)  # of a block
        found, packed = empty_weight(weight, self.shape, dtype), weight.reshape(-1)
        for begin, end in row_pieces(self.shape, self.blocksize * outer):
            first, last = begin * width // self.blocksize, -(-end * width // self.blocksize)
            expand_blocks = absmax[first * absmax_bytes : last * absmax_bytes]
            outers = None if nested[0] is None else nested[0][first // outer * 4 : -(-last // outer) * 4]
            count = (end - begin) * width
            # As rows of a block each: any others the library's kernel for AVX-512 reads wrongly.
            shape = (count,) if count % self.blocksize else (count // self.blocksize, self.blocksize)
            state = replace(self, shape=shape).state(expand_blocks, (outers, *nested[1:]))
            piece = dequantize(packed[begin * width // 2 : -(-end * width // 2)], state)
            found[begin:end] = piece.reshape(end - begin, width)
        return found

    def _unpack_fake(self, weight: Tensor, absmax: Tensor, nested: Sequence[Tensor | None]) -> Tensor:
        """The library's calls without values, for which it need not be installed."""
        nested_absmax, nested_quant_map, nested_offset = nested
        if nested_absmax is None or nested_quant_map is None or nested_offset is None:
            absmax = tensor_from_bytes(absmax, torch.float32)
        else:
            outer = [tensor_from_bytes(part, torch.float32) for part in (nested_absmax, nested_quant_map)]
            absmax = fake_weight([absmax, *outer], absmax.shape, torch.float32)
            absmax += tensor_from_bytes(nested_offset, torch.float32).reshape(())
        return fake_weight([weight, absmax], self.shape, self.dtype)


def linear_4bit(
    input: Tensor,
    weight: Tensor,
    absmax: Tensor,
    bias: Tensor | None = None,
    nested_absmax: Tensor | None = None,
    nested_quant_map: Tensor | None = None,
    nested_offset: Tensor | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    **form: Any,
) -> Tensor:
    """`bitsandbytes.nn.Linear4bit` on the bytes of its weight: unpacked for the product, and again in backward unless
    `keep_unpacked_weights` says otherwise.

    absmax: of each block of `blocksize` weights, fp32; or, where that is quantised itself, 8 bits each, beside
        `nested_absmax`, `nested_quant_map` and `nested_offset`.
    compute_dtype: of the product; None for that of the input. form: the fields of `Format4bit`.
    """
    if has_torch_function((input,)):
        found: Tensor = handle_torch_function(
            linear_4bit, (input,), input, weight, absmax, bias, nested_absmax, nested_quant_map, nested_offset,
            **form, compute_dtype=compute_dtype,
        )  # fmt: skip
        return found
    own = input.dtype
    compute = compute_dtype or own
    given = bias if bias is None else bias.to(compute)
    packing = Format4bit(**form)
    found = Linear4bit.apply(
        input.to(compute), weight, absmax, given, nested_absmax, nested_quant_map, nested_offset, packing
    )
    return found.to(own)


def is_fusible(input: Tensor) -> bool:
    """Whether on a GPU the library may have a product that never writes the whole weight; that depends on the card."""
    return input.numel() <= FUSED_ROWS * input.shape[-1]


class Linear4bit(torch.autograd.Function):
    """`linear_4bit` for autograd."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, absmax: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *nested, form = rest
        is_fused = is_fusible(input) and "cuda" in (input.device.type, keeps_weights_on())
        # What backward would unpack has the same bits: it rounds no more than forward does.
        is_equal = form.dtype in (input.dtype, torch.float32)
        keeps = bool(keeps_weights_on()) and not is_fused and is_equal and ctx.needs_input_grad[0]
        ctx.form, ctx.bias, ctx.is_unpacked = form, None if bias is None else (bias.shape, bias.dtype), keeps
        if keeps:
            with lending(None):
                plain = replace(form, dtype=input.dtype).unpack(weight, absmax, nested, input.dtype)
            ctx.save_for_backward(plain)
            return F.linear(input, plain, bias)
        ctx.save_for_backward(weight, absmax, *nested)
        if input.is_cuda and is_fused:
            product: Tensor = bitsandbytes().matmul_4bit(input, weight, form.state(absmax, nested), bias=bias)
            return product
        plain = replace(form, dtype=input.dtype).unpack(weight, absmax, nested, input.dtype)
        return F.linear(input, plain, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        of_input = of_bias = None
        if ctx.is_unpacked:
            of_input = torch.matmul(grad, ctx.saved_tensors[0])
        elif ctx.needs_input_grad[0]:
            weight, absmax, *nested = ctx.saved_tensors
            of_input = torch.matmul(grad, ctx.form.unpack(weight, absmax, nested, grad.dtype))
        if ctx.needs_input_grad[3]:
            of_bias = gradient_of_bias(grad, *ctx.bias)
        return of_input, None, None, of_bias, None, None, None, None
