"""Parameters that forward trains from a line on, or no longer, by `requires_grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ....ir.errors import CaptureError


class SwitchedGradients:
    """`names`: of the parameters, by id; `where`: says the line that runs."""

    def __init__(self, names: Mapping[int, Sequence[str]], where: Callable[[], str]):
        self.names, self.where = names, where
        self.found: dict[int, str] = {}  # ids of parameters with another requires_grad now -> what to say

    def note(self, tensor: torch.Tensor, requires_grad: bool = True) -> None:
        """Note where forward trains a parameter from now on, or no longer, until it sets that back, as PEFT does around
        a forward without adapters. A gradient of any other tensor would be computed for nobody: PEFT's and
        transformers' hooks on embeddings ask for it."""
        names = self.names.get(id(tensor), ())
        self.found.pop(id(tensor), None)
        if names and tensor.requires_grad != requires_grad:
            self.found[id(tensor)] = (
                f"{self.where()}\n  forward sets requires_grad of {names[0]!r} to {requires_grad}, where it was "
                f"{tensor.requires_grad}: set it before compile; detach() a weight to leave it out of one use"
            )

    def require_unused(self, values: Iterable[Any]) -> None:
        """Raise `CaptureError` for a parameter that is used while its `requires_grad` is another."""
        for value in values if self.found and torch.is_grad_enabled() else ():
            if id(value) in self.found:
                raise CaptureError(self.found[id(value)])

    def require_none(self) -> None:
        """Raise `CaptureError` for one that forward has left so."""
        for text in self.found.values():
            raise CaptureError(text)
