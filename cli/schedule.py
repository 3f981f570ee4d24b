"""Learning rates over a run, in a form that every worker can import."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..ir.errors import PlanError

SCHEDULES = ("constant", "linear", "cosine")


def schedule(name: str, steps: int, warmup: int = 0) -> Any:
    """The function that makes an optimizer's schedule; None for a constant rate. Raises `PlanError` for an unknown
    name."""
    if name not in SCHEDULES:
        raise PlanError(f"--schedule {name!r}; allowed are {', '.join(SCHEDULES)}")
    if warmup >= steps > 0:
        raise PlanError(f"--warmup-steps {warmup}: the run has {steps} steps, so that its rate would never be reached")
    if warmup:
        return functools.partial(warm_up, name=name, steps=steps, warmup=warmup)
    if name == "linear":
        return functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=steps)
    if name == "cosine":
        return functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
    return None


def warm_up(optimizer: torch.optim.Optimizer, name: str, steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of an optimizer that begins with a warm-up."""
    share = functools.partial(factor, name=name, steps=steps, warmup=warmup)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def factor(step: int, name: str, steps: int, warmup: int) -> float:
    """The share of the rate in a step: up to all of it in `warmup` steps, then by the schedule's name."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if name == "linear":
        return max(0.0, 1.0 - done)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))) if name == "cosine" else 1.0
