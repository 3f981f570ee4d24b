"""Runs the gradient hooks of a stage's parameters in the memory of its gradients, on whole gradients or on pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...ir.program import HOOK_PORTION_ELEMENTS, Earlier, HookCall, ParamSpec, elementwise


def run_hooks(params: Sequence[ParamSpec], grads: Mapping[str, Tensor], loss_scale: float = 1.0) -> None:
    """Replace the gradients of parameters that have a hook by what it makes of them, in place.

    Hooks see gradients without the loss scale, in fp32 if there is one; gradients that overflowed stay as they are.
    """
    for param in params:
        grad = grads.get(param.name)
        if not param.hook or grad is None:
            continue
        for portion in _portions(grad):
            if loss_scale == 1.0:
                portion.copy_(call_hooks(param.hook, portion))
            else:
                full = portion.float() / loss_scale
                made = call_hooks(param.hook, full) * loss_scale
                portion.copy_(torch.where(portion.isfinite(), made, portion))


def change_params(params: Sequence[ParamSpec], masters: Mapping[str, Tensor]) -> None:
    """Do to masters, or pieces of them, what forward has done in place to the weights that it ran on. Where these are
    the same tensors, nothing changes."""
    for param in params:
        if param.change and param.name in masters:
            for portion in _portions(masters[param.name]):
                portion.copy_(call_hooks(param.change, portion))


def call_hooks(calls: Sequence[HookCall], grad: Tensor) -> Tensor:
    """The result of hooks for a gradient, which is not changed."""
    values = [grad]
    for call in calls:
        operator = elementwise(call.op)
        assert operator is not None, f"{call.op} was checked when it was read"
        args = [values[arg.index] if isinstance(arg, Earlier) else arg for arg in call.args]
        options = {key: getattr(torch, str(value)) if key == "dtype" else value for key, value in call.options}
        values.append(operator(*args, **options))
    return values[-1]


def _portions(grad: Tensor) -> Sequence[Tensor]:
    """Views that cover a gradient; of one in another layout than rows, the whole."""
    return grad.view(-1).split(HOOK_PORTION_ELEMENTS) if grad.is_contiguous() else [grad]
