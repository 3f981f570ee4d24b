"""A number of rows that a mask chooses, as the user's code sees it: only the step knows whether there are any.

Python may compare it with 0, or hand it to a reshape of such rows; all else is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .branches import ANSWERS

if TYPE_CHECKING:
    from .chosen import ChosenRows, MaskPlaces


def _refuse_use(self: ChosenCount, *_: Any) -> NoReturn:
    self.chosen.refuse()


class ChosenCount:
    """A number of chosen rows, of which only the step knows whether there are any. `value`: the number of all rows,
    which it is as an argument of a reshape; or its place in a list of sizes."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any, chosen: ChosenRows, of: MaskPlaces | None):
        self.value, self.chosen, self.of = value, chosen, of

    def __index__(self) -> int:
        """Torch asks arguments, before it hands them over; anyone else is found out by the next call."""
        if not isinstance(self.value, int):
            self.chosen.refuse()
        frame = sys._getframe(1)
        self.chosen.read = frame, frame.f_lasti
        return self.value

    def __bool__(self) -> bool:
        return self.chosen.decide(self, True, sys._getframe(1))


def _compare(sign: str) -> Callable[[ChosenCount, Any], bool]:
    def compare(self: ChosenCount, other: Any) -> bool:
        if type(other) is not int or (sign, other) not in ANSWERS:
            self.chosen.refuse()
        return self.chosen.decide(self, ANSWERS[sign, other], sys._getframe(1))

    return compare


for _name, _sign in {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
    setattr(ChosenCount, f"__{_name}__", _compare(_sign))
for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod",
    "rpow", "neg", "abs", "int", "float", "repr", "str", "format", "divmod", "and", "or", "xor", "invert",
):  # fmt: skip
    setattr(ChosenCount, f"__{_name}__", _refuse_use)
