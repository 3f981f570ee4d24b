"""A gradient hook of a parameter as data: the element-wise calls of torch that it makes, in order.

A hook in this form acts on any piece of a gradient, can be read from a file without running anything, and is compared
by value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Number = bool | int | float


@dataclass(frozen=True)
class Earlier:
    """An operand that is the gradient (index 0) or the result of the call of this number, counted from 1."""

    index: int


@dataclass(frozen=True)
class HookCall:
    """One call, such as `aten.clamp.default` with (Earlier(0), -1.0, 1.0). A dtype is given by torch's name."""

    op: str
    args: tuple[Earlier | Number | str | None, ...] = ()
    options: tuple[tuple[str, Number | str | None], ...] = ()

    def __str__(self) -> str:
        given = [f"v{a.index}" if isinstance(a, Earlier) else str(a) for a in self.args]
        return f"{self.op.split('.')[1]}({', '.join([*given, *(f'{key}={value}' for key, value in self.options)])})"


_OPERATOR = type(torch.ops.aten.neg.default)
# Beside torch's element-wise operators, those that make a tensor of another's shape, and the conversion to a dtype.
_LIKE = {"aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default", "aten._to_copy.default"}


def elementwise(name: str) -> Any:
    """The operator of this name, or None for one that is not element-wise, draws random numbers or writes in place."""
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None) if library == "aten" else None
    if not isinstance(found, _OPERATOR) or found._schema.is_mutable:
        return None
    safe = torch.Tag.pointwise in found.tags and torch.Tag.nondeterministic_seeded not in found.tags
    return found if safe or name in _LIKE else None


def wrong_calls(calls: tuple[HookCall, ...]) -> Iterator[str]:
    """The error in a hook's calls."""
    for number, call in enumerate(calls):
        if elementwise(call.op) is None:
            yield f"calls {call.op!r:.60}, which is no element-wise operator"
        if any(isinstance(arg, Earlier) and not 0 <= arg.index <= number for arg in call.args):
            yield f"reads the result of a later call in call {number + 1}"
