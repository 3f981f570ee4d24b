"""Weight prediction: where an optimizer's running averages lead in so many updates.

SGD with momentum (SpecTrain): w - n lr v. Adam and AdamW (XPipe): w - n lr m' / (sqrt(v') + eps) with the averages
m' and v' corrected for their begin, and AdamW's decay besides, w (1 - n lr decay). Whatever gradients will come, they
are taken to be what the average of the last ones was.
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
    """Raise `PlanError` for an optimizer whose next updates cannot be foretold from its states."""
    able = "torch.optim.SGD with momentum in all its groups, torch.optim.Adam and torch.optim.AdamW have one"
    kind = resolve(spec.path)
    hint = f"; {able}. weights=current and weights=stash need none"
    if kind not in RULES:
        raise PlanError(f"weights=predict: optimizer {spec.path} has no rule for what its next updates will be{hint}")
    if kind is torch.optim.SGD:
        momenta = [group.options.get("momentum", spec.kwargs.get("momentum", 0)) for group in spec.all_groups]
        if not all(momenta):
            raise PlanError(
                f"weights=predict: optimizer {spec.path} without momentum keeps nothing to predict from{hint}"
            )


def extrapolate(
    optimizer: StageOptimizer, weights: Mapping[str, Tensor], updates: int, shared_updates: int, shared: Collection[str]
) -> None:
    """Set a stage's `weights` to what its parameters will be behind so many more updates, those that it shares with
    other stages behind `shared_updates`; as they are where they have had none yet."""
    for name in optimizer.params:
        count = shared_updates if name in shared else updates
        if count:
            weights[name].copy_(_extrapolated(optimizer, name, count, name in shared))


def _extrapolated(optimizer: StageOptimizer, name: str, updates: int, is_shared: bool) -> Tensor:
    """In full precision. Shared parameters go on with the learning rate of the update that they lack first."""
    param = optimizer.params[name].detach()
    assert optimizer.optimizer is not None
    state = optimizer.optimizer.state.get(optimizer.params[name])
    index = optimizer.spec.group_of(name)
    groups = optimizer.waiting[0] if is_shared and optimizer.waiting else optimizer.optimizer.param_groups
    if not state or state.get("momentum_buffer", param) is None:
        return param
    with torch.no_grad():
        update = RULES[type(optimizer.optimizer)](groups[index], state, param)
        return param - update.mul_(updates)
