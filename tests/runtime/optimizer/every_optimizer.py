"""Every optimizer of torch that steps on dense gradients alone, in each of its modes: fused, foreach and loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.95)),
    "Adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=2),
    "Adafactor": torch.optim.Adafactor,
}
HAVE_FUSED = ("AdamW", "Adam", "Adagrad", "SGD", "SGD-momentum")
MODES: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
EVERY_OPTIMIZER = {
    f"{name}-{mode}": partial(kind, **given)
    for name, kind in KINDS.items()
    for mode, given in MODES.items()
    if mode != "fused" or name in HAVE_FUSED
}


def name_of(given: object) -> str:
    """The name of a test case."""
    if given is None:
        return "constant"
    return str(getattr(given, "func", given).__name__)  # type: ignore[attr-defined]


class Replacing(torch.optim.Optimizer):
    """Makes its states anew in every step, uses the gradients' memory, and counts the steps."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    row = self.state[param]
                    row["steps"] = row.get("steps", 0) + 1
                    row["mean"] = row.get("mean", torch.zeros_like(param)) * 0.9 + param.grad.mul_(0.1)
                    param.sub_(row["mean"], alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, as some optimizers do: each call of `step` is one."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    mean: Tensor = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.5)
                    param.sub_(mean, alpha=group["lr"] / group["count"])
