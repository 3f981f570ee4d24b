"""Tensors that a model or loss function uses but does not register: kept with the graph, each under a name of its own.

In: the borrowed model and the loss function. Out: a name for each such tensor, that of the attribute or variable that
holds it where it has one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class ConstantNames:
    """Gives out names that are no names in the model."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None):
        self._called: dict[int, str] = {}  # id(tensor) -> the first name under which it is held
        self._taken = {name.partition(".")[0] for name, _ in (*model.named_modules(), *model.named_parameters())}
        self._taken |= {name.partition(".")[0] for name, _ in model.named_buffers()}
        for name, value in (*_attributes(model), *_variables(loss_fn)):
            if isinstance(value, torch.Tensor):
                self._called.setdefault(id(value), name)
        self._count = 0

    def take(self, tensor: torch.Tensor) -> str:
        name = self._called.get(id(tensor), "")
        if not name.isidentifier() or name in self._taken:
            name = f"_constant{self._count}"
            self._count += 1
        self._taken.add(name)
        return name


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            yield f"{path}.{name}".lstrip(".").replace(".", "_"), value


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over or reads of its module, and the attributes of a callable object."""
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from found.nonlocals.items()
        yield from found.globals.items()
    elif isinstance(function, nn.Module):
        yield from (*function.named_buffers(recurse=False), *function.named_parameters(recurse=False))
    elif function is not None:
        yield from getattr(function, "__dict__", {}).items()
