"""Base classes of generated files: modules whose members carry the user's own dotted names.

A stage holds only some of the user's parameters, under names such as `transformer.h.3.attn.c_attn.weight`. `Scope` is
the container for every part of such a name, numbers included: `self.transformer.h[3].attn.c_attn.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Scope(nn.Module):
    """A part of a dotted name. Members that no attribute can name (`3`, `a-b`) are reached by index: `scope[3]`."""

    def __init__(self, members: Mapping[int | str, nn.Module] | None = None):
        super().__init__()
        for key, member in (members or {}).items():
            self[key] = member

    def __getitem__(self, key: int | str) -> Any:
        name = str(key)
        for members in (self._modules, self._parameters, self._buffers):
            if name in members:
                return members[name]
        raise KeyError(f"no member {name!r}; there are {', '.join(self._modules | self._parameters | self._buffers)}")

    def __setitem__(self, key: int | str, member: nn.Module | nn.Parameter) -> None:
        if isinstance(member, nn.Parameter):
            self.register_parameter(str(key), member)
        else:
            self.add_module(str(key), member)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)


class Stage(Scope):
    """A part of the model that is run as one: `forward(*inputs)` returns a tuple of the stage's outputs."""

    _device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The device that the runtime has set, or else that of the stage's tensors; new tensors are made on it."""
        if self._device is not None:
            return self._device
        tensors = (*self.parameters(), *self.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = device
