"""Callbacks of a Trainer see the trained weights, and what they set in its optimizer counts, as in a Trainer.

In: the callbacks, and what their code reads. Out: a callback in front of them that syncs the model; a copy of the
schedule that tells what nobody but a callback can have set.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ...compiler.job.job import Job
from ...ir.errors import PlanError

_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
_IN_STEP = ("on_pre_optimizer_step", "on_optimizer_step")  # what comes between is one call of the job
_PLAIN = (bool, int, float, str, Path, type(None))


class SyncFirst(TrainerCallback):
    """Comes before all others, and syncs the model where one of them may read it. `sync`: does it once a step."""

    def __init__(self, others: Iterable[TrainerCallback], sync: Callable[[], None]):
        self._sync = sync
        self._events = {event for event in _EVENTS for other in others if _may_read_model(other, event)}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _EVENTS or name not in self._events:
            return found
        return lambda *args, **kwargs: self._sync()


def refuse_callbacks(callbacks: Iterable[TrainerCallback]) -> None:
    """Raise `PlanError` for a callback that reads model, gradients or optimizer inside of a step."""
    for callback in callbacks:
        for event in _IN_STEP:
            if _may_read_model(callback, event):
                raise PlanError(
                    f"{type(callback).__name__}.{event} of callbacks may read gradients or weights in the middle of a "
                    "step, which a Job takes as a whole. Use: on_step_begin or on_step_end for weights and rates; "
                    "max_grad_norm or gradient hooks (parameter.register_hook) for gradients"
                )


def _may_read_model(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback of the script has a method for this event that names the model, hands on all it is given, or
    holds objects through which it may read it."""
    method = getattr(type(callback), event)
    if method is getattr(TrainerCallback, event) or type(callback).__module__.partition(".")[0] == "transformers":
        return False
    code = inspect.unwrap(method).__code__
    rest = {p.name for p in inspect.signature(method).parameters.values() if p.kind is p.VAR_KEYWORD}
    told = {step.argval for step in dis.get_instructions(code) if isinstance(step.argval, str)} | _inner_names(code)
    return bool(told & ({"model", "optimizer"} | rest)) or not all(map(_is_plain, vars(callback).values()))


def _inner_names(code: CodeType) -> set[str]:
    """The names and texts in functions inside of a function."""
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    own = {*code.co_names, *code.co_freevars, *(each for each in code.co_consts if isinstance(each, str))}
    return own.union(*map(_inner_names, inside))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


class SetOptions:
    """Finds what callbacks have set in the Trainer's optimizer, by a schedule of its own that runs beside it.
    `schedule`: None where the job has none; then every rate is set, step by step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Callable[[torch.optim.Optimizer], Any] | None, state: Any
    ):
        rows = [{"params": [nn.Parameter(torch.zeros(()))], "lr": group["lr"]} for group in optimizer.param_groups]
        self._optimizer, self._twin = optimizer, torch.optim.SGD(rows)
        self._schedule = None if schedule is None else schedule(self._twin)
        if self._schedule is not None:
            self._schedule.load_state_dict(state)
        self._before = [_options(group) for group in optimizer.param_groups]
        self._set_rates(None if schedule is None else optimizer)

    def take(self) -> list[tuple[int, str, Any]]:
        """Group, option and value of what was set since the last call, before the step that is to have it."""
        found = []
        for index, group in enumerate(self._optimizer.param_groups):
            due = {**self._before[index], "lr": self._twin.param_groups[index]["lr"]}
            found += [(index, key, value) for key, value in _options(group).items() if value != due.get(key)]
            self._before[index] = _options(group)
        self._set_rates(self._optimizer)
        return found

    def step(self) -> None:
        """A step of the schedule, as the Trainer makes of its own after each step."""
        if self._schedule is not None:
            self._twin.step()  # which has no gradients: a schedule wants it first
            self._schedule.step()

    def _set_rates(self, optimizer: torch.optim.Optimizer | None) -> None:
        for index, twin in enumerate(self._twin.param_groups):
            twin["lr"] = None if optimizer is None else optimizer.param_groups[index]["lr"]


def set_options(job: Job, numbers: Sequence[int], found: Sequence[tuple[int, str, Any]]) -> None:
    """Set on the devices what `SetOptions.take` found. `numbers`: of the optimizer's groups, for each of the job's."""
    groups = job.param_groups if found else []
    for index, key, value in found:
        for own, number in enumerate(numbers):
            if number == index and key in groups[own]:
                groups[own][key] = value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: float(v) if isinstance(v, torch.Tensor) else v for key, v in group.items() if key != "params"}
