"""A model as its class has it, for the time in which it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def own_forward(*models: nn.Module | None) -> Iterator[None]:
    """Without the `forward` that TRL and Accelerate set on instances: TRL's makes probabilities in place of a loss."""
    taken: list[tuple[Any, Any]] = []
    for model in models:
        for module in model.modules() if model is not None else ():
            if "forward" in vars(module):
                taken.append((module, vars(module).pop("forward")))
    try:
        yield
    finally:
        for module, forward in taken:
            module.forward = forward
