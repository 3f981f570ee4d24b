"""Base classes of generated files: modules whose members carry the user's own dotted names.

A stage holds only some of the user's parameters, under names such as `transformer.h.3.attn.c_attn.weight`. `Scope` is
the container for every part of such a name, numbers included: `self.transformer.h[3].attn.c_attn.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Seeding(Protocol):
    """The seeds of a stage's draws while it runs."""

    def begin(self, place: str) -> int:
        """Seed the next draw at a place, a dotted path in the user's model. Returns the draw's number there."""


class Scope(nn.Module):
    """A part of a dotted name. Members that no attribute can name (`3`, `a-b`) are reached by index: `scope[3]`."""

    _seeding: Seeding | None = None
    _path = ""
    recomputing = False  # whether forward runs again before backward, which needs not all of it

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


# Functions, so that members of the user's names hide no method of a scope.
def draw_at(scope: Scope, path: str = "") -> None:
    """Say that the next line draws random numbers, in the forward of the user's module at this path inside of `scope`.

    The runtime seeds the generators by the place. In a stage that no runtime runs, nothing is done.
    """
    if scope._seeding is not None:
        scope._seeding.begin(f"{scope._path}.{path}" if scope._path and path else scope._path or path)


class Stage(Scope):
    """A part of the model that is run as one: `forward(*inputs)` returns a tuple of the stage's outputs.

    `draws` has the numbers of its draws at each place where they are not 0, 1, 2, ...: other stages draw there, too.
    `unread`: the paths of blocks whose results backward does not need: they know when the stage runs again.
    """

    _device: torch.device | None = None

    def __init__(self, draws: Mapping[str, Sequence[int]] | None = None, unread: Sequence[str] = ()):
        super().__init__()
        self._draws = dict(draws or {})
        self._unread = tuple(unread)

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


@contextmanager
def recomputing(stage: nn.Module, leaves_out: bool) -> Iterator[None]:
    """Within this, a stage's forward leaves out what backward needs nothing of, if `leaves_out`."""
    if not isinstance(stage, Stage) or not leaves_out:
        yield
        return
    scopes = [stage, *map(stage.get_submodule, unread_paths(stage))]
    for scope in scopes:
        scope.recomputing = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for scope in scopes:
            del scope.recomputing


def unread_paths(stage: Stage) -> Sequence[str]:
    """The `unread` that the stage was made with."""
    return stage._unread


def draw_numbers(stage: Stage) -> Mapping[str, Sequence[int]]:
    """The `draws` that the stage was made with."""
    return stage._draws


def draw_from(stage: Stage, seeding: Seeding) -> None:
    """Let `seeding` seed all draws of the stage."""
    for path, scope in stage.named_modules():
        if isinstance(scope, Scope):
            scope._seeding, scope._path = seeding, path
