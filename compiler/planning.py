"""Settings of Python and torch while a plan is made, and of torch while a job runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ..ir.errors import PlanError

T = TypeVar("T")
_SHARED: ContextVar[dict[Hashable, Any] | None] = ContextVar("shared", default=None)
RARE = (50_000, 20, 50)  # thresholds of Python's three generations


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage cycles rarely: graphs of big models are many objects, and nearly all of them stay.

    That saves a quarter of the time to plan GPT-3 175B and costs 10 MB (bench/plan_time.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def sharing() -> Iterator[None]:
    """Make models and op graphs once for all plans that are made within: what `share` returned for a key before."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def is_sharing() -> bool:
    return _SHARED.get() is not None


def share(key: Hashable, make: Callable[[], T]) -> T:
    """The value of the key; made anew outside of `sharing`."""
    known = _SHARED.get()
    if known is None:
        return make()
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


@contextmanager
def fixed_torch() -> Iterator[None]:
    """One state of torch, whatever the caller has: tensors are made on the CPU in float32, nothing is cast by itself,
    and gradients are recorded. Workers have this state, so a plan gives the same numbers in this process."""
    import torch  # commands that plan nothing do without it

    default = torch.get_default_dtype()
    with ExitStack() as state:
        state.enter_context(torch.inference_mode(False))
        state.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                state.enter_context(torch.autocast(kind, enabled=False))
        if torch.empty(0).device.type != "cpu":  # otherwise without a context, which each call of torch would pass
            state.enter_context(torch.device("cpu"))
        if default != torch.float32:
            torch.set_default_dtype(torch.float32)
            state.callback(torch.set_default_dtype, default)
        yield


@contextmanager
def planning() -> Iterator[None]:
    """Plan in one state of torch, and look for garbage rarely.

    Raises `PlanError` where tensors of another type than float32 are made by default: the model would make such in
    eager, and workers do not.
    """
    import torch

    default = torch.get_default_dtype()
    if default != torch.float32:
        raise PlanError(
            f"torch.get_default_dtype() is {default}, in which this script makes tensors; devices make them in "
            "float32: call torch.set_default_dtype(torch.float32) before compile; precision= sets a plan's types"
        )
    with fixed_torch(), rare_collections():
        yield
