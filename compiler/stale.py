"""Marks on the user's model while the devices of its job hold newer weights: the first use of the old ones warns.

A mark is a hook on the model and on every module in it that has children, before its forward and before its state dict
is read. It holds neither the job nor the model. A copy or a pickle of the model, which takes the old weights as well,
gets a hook that does nothing. From the first step to the end of the job, methods that read gradients are refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ir.errors import PlanError, StaleModelWarning

LIBRARIES = ("torch", "transformers", "peft", "copy", str(__package__))
READS_GRADIENTS = ("update_and_allocate",)  # of PEFT: AdaLoRA gives ranks to layers by them


@dataclass
class Unsynced:
    """The time from a step to the next `sync`, on one model: it is warned of once."""

    model: str
    told: bool = False
    closed: bool = False

    def tell(self) -> None:
        if self.told:
            return
        self.told = True
        there = (
            "its job was closed before job.sync(), which would have brought what was trained here"
            if self.closed
            else "what was trained is on the devices, and job.sync() brings it here; job.evaluate(batch), "
            "job.state_dict() and job.save_pretrained(directory) need no sync"
        )
        text = f"this {self.model} still has the weights from before training: {there}"
        warnings.warn(text, StaleModelWarning, stacklevel=level_of_user())


class _Mark:
    def __init__(self, unsynced: Unsynced):
        self.unsynced = unsynced

    def __call__(self, module: nn.Module, *_: object) -> None:
        self.unsynced.tell()


class _ForwardMark(_Mark):
    def __reduce__(self) -> Any:
        self.unsynced.tell()
        return getattr, ({}, "get")  # called with a module and its arguments, it returns the arguments


class _StateMark(_Mark):
    def __reduce__(self) -> Any:
        return type, (slice(None),)  # called with three arguments, it makes a slice that nobody reads


@dataclass
class _GradientReader:
    """In place of a method of a module. A copy of the module gets the method itself."""

    module: nn.Module
    name: str

    def __call__(self, *_: object, **__: object) -> None:
        raise PlanError(
            f"{type(self.module).__name__}.{self.name} reads the gradients of the model, which are on the devices of "
            "its job and gone after the update: leave the call out, and all adapters are trained in full with the "
            "ranks that they began with; or choose the ranks before, with rank_pattern of LoRA"
        )

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.name)


def mark(model: nn.Module) -> Unsynced:
    """Mark the model as stale. Marks of an earlier job that was closed make room."""
    unmark(model)
    unsynced = Unsynced(type(model).__name__)
    for module in (m for m in model.modules() if m is model or any(True for _ in m.children())):
        module.register_forward_pre_hook(_ForwardMark(unsynced))
        module.register_state_dict_pre_hook(_StateMark(unsynced))
    _refuse_gradient_readers(model)
    return unsynced


def is_mark(hook: Any) -> bool:
    """Whether a hook of a module is such a mark."""
    return isinstance(hook, _Mark)


def unmark(model: nn.Module) -> None:
    for hooks, key in _marks(model):
        del hooks[key]


def allow_forward(model: nn.Module) -> None:
    """Take the mark off the forward of the model itself, whose caller runs a job's step in its place."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if is_mark(hook):
            del model._forward_pre_hooks[key]


def tell_if_marked(model: nn.Module) -> None:
    """Warn where another job's devices, not stopped yet, have newer weights than the model."""
    for hooks, key in _marks(model):
        if not hooks[key].unsynced.closed:
            hooks[key].unsynced.tell()


@contextmanager
def hide_marks(model: nn.Module) -> Iterator[None]:
    """Take the marks off the model while the body reads or runs it."""
    taken = [(hooks, key, hooks[key]) for hooks, key in _marks(model)]
    unmark(model)
    try:
        yield
    finally:
        for hooks, key, found in taken:
            hooks[key] = found


def _marks(model: nn.Module) -> list[tuple[dict[int, Any], int]]:
    every = (hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._state_dict_pre_hooks))
    return [(hooks, key) for hooks in every for key, hook in hooks.items() if is_mark(hook)]


def _refuse_gradient_readers(model: nn.Module) -> None:
    for module in model.modules():
        for name in READS_GRADIENTS:
            if callable(getattr(type(module), name, None)):
                module.__dict__[name] = _GradientReader(module, name)


def allow_gradient_readers(model: nn.Module) -> None:
    """Give the model back its methods that read gradients."""
    for module in model.modules():
        for name in READS_GRADIENTS:
            module.__dict__.pop(name, None)


def level_of_user() -> int:
    """The `stacklevel` for `tell` with which a warning names the script's line, not a library's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_library(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LIBRARIES)
