"""Parts of forward that eager PyTorch skips, such as experts without tokens: a program computes them for nobody."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_names import FakeTensor


def gradient_if(value: Tensor, condition: Tensor) -> Tensor:
    """The value. Without the condition no gradient goes on to what it is made of, so that a parameter which nothing
    else reads has none, as in eager PyTorch. The host waits for the condition in backward."""
    found: Tensor = _GradientIf.apply(value, condition)
    return found


class _GradientIf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, condition: Tensor) -> Tensor:
        ctx.save_for_backward(condition)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (condition,) = ctx.saved_tensors
        is_met = isinstance(condition, FakeTensor) or bool(condition)
        return (grads[0] if is_met else None), None
