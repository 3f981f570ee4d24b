"""Modes of torch that see the calls of a model: its functions, the ATen calls below a transform, and random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ....ir.errors import CaptureError
from ....runtime.torch_names import TorchDispatchMode


class EachFunction(TorchFunctionMode):
    """Calls `on_function(function, args, kwargs)` in place of every torch function that runs under it."""

    def __init__(self, on_function: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]):
        super().__init__()
        self.on_function = on_function

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self.on_function(func, args, kwargs or {})


class EachPlainCall(TorchDispatchMode):
    """Calls `on_call(operator, args, kwargs)` in place of every ATen call on plain tensors: below function transforms,
    which are to be left before its first `error` is raised."""

    def __init__(self, on_call: Callable[..., Any]):
        super().__init__()
        self.on_call = on_call
        self.error: CaptureError | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.error is None:
            try:
                return self.on_call(func, args, kwargs or {})
            except CaptureError as error:
                self.error = error
        return func(*args, **(kwargs or {}))


class DrawWatch(TorchDispatchMode):
    """Notices whether the ops that run under it draw random numbers."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))

    def watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_watched(*args: Any) -> Any:
            with self:
                return run(*args)

        return run_watched


class ReadWatch(TorchDispatchMode):
    """Notices whether a call that runs under it reads a tensor as a number, as `view` does of a size."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
