"""The `apply` of autograd functions: torch's own, and those that a script has taken from their classes before.

`relu = Relu.apply`, taken before a trace, is a bound method of torch's own `apply`, which a replaced one does not
reach. Up to PyTorch 2.13 that is a function of Python, whose code is exchanged for a while. From 2.14 on it is written
in C: of Python it sees only the attributes that it asks the class for, `_backward_cls` first and then `forward`, and
for a while the class answers with a forward that calls the replaced `apply`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import CaptureError
from ...runtime.torch_names import DisableTorchFunction, set_grad_enabled, tree_leaves

TORCH_APPLY = torch.autograd.Function.__dict__["apply"]
_CLASSES = type(torch.autograd.Function)


class _Depth(threading.local):
    """In how many of torch's own `apply` this thread is, by `original_apply`."""

    depth = 0


class _Late:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # as the code of torch's apply, where `__class__` is Function
        return __class__.__dict__["apply"].__get__(None, cls)(*args, **kwargs)  # type: ignore[name-defined]


if isinstance(TORCH_APPLY, classmethod):
    _PYTHON = TORCH_APPLY.__func__
    original_apply = FunctionType(_PYTHON.__code__, _PYTHON.__globals__, "apply", None, _PYTHON.__closure__)

    @contextmanager
    def redirect_taken_functions() -> Iterator[None]:
        """Let functions that a script has taken from their classes call the `apply` that replaces torch's."""
        before, _PYTHON.__code__ = _PYTHON.__code__, _Late.apply.__code__
        try:
            yield
        finally:
            _PYTHON.__code__ = before

else:
    _RUNNING = _Depth()

    def original_apply(cls: type, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
        """Torch's own `apply` of a class."""
        _RUNNING.depth += 1
        try:
            return TORCH_APPLY.__get__(None, cls)(*args, **kwargs)
        finally:
            _RUNNING.depth -= 1

    @contextmanager
    def redirect_taken_functions() -> Iterator[None]:
        """Let functions that this thread calls, and that were taken from their classes, call the `apply` that replaces
        torch's."""
        thread, asked = threading.get_ident(), {}
        before = _CLASSES.__dict__.get("__getattribute__")

        def attribute(cls: type, name: str) -> Any:
            value = type.__getattribute__(cls, name)
            if threading.get_ident() != thread or _RUNNING.depth:
                return value
            if name == "_backward_cls":
                asked[cls] = torch.is_grad_enabled()
            elif name == "forward" and cls in asked:
                return _forward_by_apply(cls, asked.pop(cls))
            return value

        _CLASSES.__getattribute__ = attribute  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            if before is None:
                del _CLASSES.__getattribute__
            else:
                _CLASSES.__getattribute__ = before  # type: ignore[method-assign]


def _forward_by_apply(cls: Any, with_grad: bool) -> Callable[..., Any]:
    """The forward of a class that calls its `apply`. The `apply` that asked for it has switched gradients off."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is torch.autograd.Function.setup_context:
            args = args[1:]  # the context, which else a function of its own fills
        _switch(with_grad)
        try:
            result = cls.apply(*args, **kwargs)
        finally:
            _switch(False)
        given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if any(id(leaf) in given for leaf in tree_leaves(result)):
            raise CaptureError(
                f"{cls.__qualname__} returns one of its inputs, and its apply was taken from the class before: write "
                f"{cls.__qualname__}.apply(...) at the call"
            )
        return result

    return forward


def _switch(enabled: bool) -> None:
    with DisableTorchFunction():
        set_grad_enabled(enabled)
