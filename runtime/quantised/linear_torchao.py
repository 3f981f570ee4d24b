"""`functions.linear_torchao`: a linear layer whose weight is one of torchao's quantised tensors, of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .bias import gradient_of_bias
from .libraries import torchao
from .raw_bytes import tensor_from_bytes

WEIGHT_ONLY = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")  # they can be unpacked on any device


@dataclass(frozen=True)
class TorchaoFormat:
    """A class of torchao, the types of its inner tensors by name, and its other attributes."""

    kind: str
    dtypes: Mapping[str, torch.dtype]
    attributes: Mapping[str, Any]

    def tensor(self, parts: Sequence[Tensor]) -> Any:
        """The library's own tensor, of which these are the bytes."""
        rows = zip(parts, self.dtypes.items(), strict=True)
        inner = {name: tensor_from_bytes(raw, dtype) for raw, (name, dtype) in rows}
        return getattr(torchao(), self.kind)(**inner, **self.attributes)


def linear_torchao(
    input: Tensor, bias: Tensor | None, *parts: Tensor, kind: str, dtypes: Mapping[str, torch.dtype],
    attributes: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """`F.linear` with a weight of torchao's class `kind`: unpacked for the product, and again in backward.

    parts: the bytes of its inner tensors, in the order of `dtypes`, which has their types by name.
    """
    if has_torch_function((input,)):
        found: Tensor = handle_torch_function(
            linear_torchao, (input,), input, bias, *parts, kind=kind, dtypes=dtypes, attributes=attributes
        )
        return found
    found = _LinearTorchao.apply(input, bias, TorchaoFormat(kind, dtypes, attributes), *parts)
    return found


class _LinearTorchao(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, form: TorchaoFormat, *parts: Tensor) -> Tensor:
        ctx.form, ctx.bias, ctx.dtype = form, None if bias is None else (bias.shape, bias.dtype), input.dtype
        ctx.save_for_backward(*parts)
        return F.linear(input, form.tensor(parts), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            plain = ctx.form.tensor(ctx.saved_tensors).dequantize()
            of_input = torch.matmul(grad, plain.to(grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient_of_bias(grad, *ctx.bias)
        return of_input, of_bias, None, *(None for _ in ctx.saved_tensors)
