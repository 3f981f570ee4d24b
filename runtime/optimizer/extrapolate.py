"""Weight prediction: the weights to which an optimizer's running averages lead after N updates.

SGD with momentum (SpecTrain): w - n lr v. Adam and AdamW (XPipe): w - n lr m' / (sqrt(v') + eps) with the
bias-corrected averages m' and v', and for AdamW the decay besides, w (1 - n lr decay). All coming gradients are assumed
to equal the average of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import PlanError
from .importable import resolve
from .spec import OptimizerSpec
from .stage_optimizer import StageOptimizer

Rule = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor], Tensor]  # group, state, weight -> update of one step


def _momentum(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    update: Tensor = float(group["lr"]) * state["momentum_buffer"]
    return update


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    steps, lr = torch.as_tensor(state["step"], dtype=torch.float64), float(group["lr"])  # on a GPU it stays there
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    size = square.sqrt().div_((1 - beta2**steps).sqrt()).add_(group["eps"])
    update: Tensor = (state["exp_avg"] / size).mul_(lr / (1 - beta1**steps))
    if group.get("decoupled_weight_decay") and group["weight_decay"]:
        update.add_(weight, alpha=lr * float(group["weight_decay"]))
    return update


RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


def require_rule(spec: OptimizerSpec) -> None:
    """Raise `PlanError` for an optimizer whose next updates cannot be predicted from its states."""
    able = "torch.optim.SGD with momentum in all its groups, torch.optim.Adam and torch.optim.AdamW have one"
    hint = f"; {able}. Pipelines that end with schedule-async{{weights=current}} or weights=stash need none"
    for index, group in enumerate(spec.all_groups):
        path, kwargs = spec.class_of(index)
        if resolve(path) not in RULES:
            raise PlanError(f"weights=predict: optimizer {path} has no rule for what its next updates will be{hint}")
        if resolve(path) is torch.optim.SGD and not group.options.get("momentum", kwargs.get("momentum", 0)):
            raise PlanError(f"weights=predict: optimizer {path} without momentum keeps nothing to predict from{hint}")


def extrapolate(
    optimizer: StageOptimizer, weights: Mapping[str, Tensor], updates: int, shared_updates: int, shared: Collection[str]
) -> None:
    """Set a stage's `weights` to what its parameters will be after `updates` more updates, and the `shared` ones after
    `shared_updates`. Parameters that have had no update yet stay as they are."""
    for name in optimizer.params:
        count = shared_updates if name in shared else updates
        if count:
            weights[name].copy_(_extrapolate(optimizer, name, count, name in shared))


def _extrapolate(optimizer: StageOptimizer, name: str, updates: int, is_shared: bool) -> Tensor:
    """In full precision. Shared parameters take the learning rate of the first update that they still lack."""
    param = optimizer.lasting[name].to(optimizer.params[name].dtype)
    assert optimizer.optimizer is not None
    state = optimizer.optimizer.state.get(optimizer.params[name])
    index = optimizer.spec.group_of(name)
    groups = optimizer.waiting[0] if is_shared and optimizer.waiting else optimizer.optimizer.param_groups
    if not state or state.get("momentum_buffer", param) is None:
        return param
    with torch.no_grad():
        rule = RULES[resolve(optimizer.spec.class_of(index)[0])]  # type: ignore[index]
        update = rule(groups[index], state, param)
        return param - update.mul_(updates)
