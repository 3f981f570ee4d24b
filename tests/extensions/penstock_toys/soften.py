"""`toys::soften`, an operator that torch does not have: `x / (1 + |x|)`, element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.graph.operators.pointwise import elementwise
from penstock.graph.operators.record import Operator, nothing

RECORD = Operator(rows=elementwise, workspace=nothing)


@torch.library.custom_op("toys::soften", mutates_args=())
def soften(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@soften.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Soften(torch.autograd.Function):
    """The operator with its gradient. A generated file imports this class, and so the operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.toys.soften(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + x.abs()) ** 2
