"""Tensors that are made by their types (`torch.LongTensor([1, 2])`, `torch.Tensor(2, 3)`), which no mode of torch sees.

In: a function that is to be called for them. Out: other types in the places of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

_KINDS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")


class TensorType(type):
    """The type of a type that makes tensors in another way, and has the instances of its own."""

    own: Any
    make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.own)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.own, name)


@contextmanager
def constructors(on_call: Callable[..., Any]) -> Iterator[None]:
    """Call `on_call(constructor, dtype, *arguments)` where this thread makes a tensor by its type."""
    thread, plain_new = get_ident(), torch.Tensor.__new__

    def function_of_thread(own: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            return on_call(own, dtype, *args, **kwargs) if get_ident() == thread else own(*args, **kwargs)

        return make

    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(plain_new, kind)
        return (function_of_thread(own, None) if kind is torch.Tensor else own)(*args, **kwargs)

    with ExitStack() as stack:
        for name in (f"{kind}Tensor" for kind in _KINDS):
            own = getattr(torch, name)
            make = staticmethod(function_of_thread(own, own.dtype))
            stack.enter_context(patch.object(torch, name, TensorType(name, (), {"own": own, "make": make})))
        stack.enter_context(patch.object(torch.Tensor, "__new__", staticmethod(new)))
        yield
