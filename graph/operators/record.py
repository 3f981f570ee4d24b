"""One operator call as the rules see it, and the table that the rules are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..opgraph import value_tensors
from .states import ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale


class Watcher(Protocol):
    """Who follows the rows: knows states so far, and is told what rules find."""

    rows: int
    is_clear: bool

    def state(self, tensor: torch.Tensor) -> RowState: ...
    def met(self, kind: Kind) -> None: ...
    def scale(self, number: float) -> Scale: ...
    def new_order(self) -> int: ...


class OperatorCall:
    """A call of one of torch's operators: arguments by the names of its schema, the result, and the states."""

    def __init__(self, watcher: Watcher, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any):
        self.watcher, self.func, self.out = watcher, func, out
        names = [argument.name for argument in func._schema.arguments]
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, args)), **kwargs}
        self.name: str = operator_name(func)
        self.rows = watcher.rows

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def state(self, name: str) -> RowState:
        """The state of a tensor argument; that of a number or None is `Free`."""
        value = self.given[name]
        return self.watcher.state(value) if isinstance(value, torch.Tensor) else Free()

    def of(self, tensor: torch.Tensor) -> RowState:
        return self.watcher.state(tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its tensor arguments."""
        for value in self.given.values():
            yield from value_tensors(value)

    def results(self) -> list[torch.Tensor]:
        return list(value_tensors(self.out))

    def mix(self, kind: Kind) -> Mixed:
        """The state of a result in which rows meet."""
        self.watcher.met(kind)
        return Mixed()

    def result_is_float(self) -> bool:
        return self.results()[0].is_floating_point()

    def unclear(self) -> Mixed:
        """The state of a result that only a micro-batch of more than one row would show."""
        self.watcher.is_clear = False
        return Mixed()


RowRule = Callable[[OperatorCall], "RowState | list[RowState]"]
RULES: dict[str, RowRule] = {}


def rule(*names: str) -> Callable[[RowRule], RowRule]:
    """Enter a rule for operators of these names; in-place forms have the name without the underscore."""

    def enter(function: RowRule) -> RowRule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter


def operator_name(func: Any) -> str:
    """`aten::add_` is "add": a rule says what a call gives, wherever it is written."""
    name = str(func._schema.name).rpartition("::")[2]
    return name if name.startswith("__") else name.rstrip("_")


def plain(state: RowState) -> RowState:
    """The state after an operation that is not linear but keeps each element's row."""
    if isinstance(state, ByRow):
        return replace(state, scale=Scale(), step=0)
    return Free(varies=state.varies, scale=bent(state.scale)) if isinstance(state, Free) else state


def bent(scale: Scale) -> Scale:
    """The scale of something that is not linear in a value of this scale: none that could be told."""
    return Scale(unsure=scale != Scale())


def nonlinear(call: OperatorCall, *states: RowState) -> Mixed | None:
    """The result's state if one of `states` is no value of single rows, so that any nonlinear function of it mixes."""
    if any(isinstance(state, Mixed) for state in states):
        return Mixed()
    if any(isinstance(state, OverRows) for state in states):
        return call.mix(Kind.NONLINEAR)
    return call.mix(Kind.ACROSS) if any(isinstance(state, Permutation) for state in states) else None
