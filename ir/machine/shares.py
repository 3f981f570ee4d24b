"""The share of its rate that a link reaches, as a curve: by the bytes of a message, by the number of hosts that take
part, or by the number of disks.

A curve is a few sizes with a share each, at most 1. Between two of them it follows a straight line in logarithms of
both; below the first and beyond the last the share stays.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from .. import units
from .rates import RateCurve, curve_reader, interpolate


def _check_at_most_all(curve: RateCurve) -> RateCurve:
    for size, share in curve:
        if share > 1:
            raise ValueError(f"shares of at most 1; at {size:g} it is {share:g}")
    return curve


_MESSAGE = units.Quantity("size", "1MB", units.BYTES.units, ("GB", "MB", "kB"))


def message_text(size: float) -> str:
    """The bytes of a message for people."""
    return _MESSAGE.format(size)


def _spell_bytes(curve: RateCurve) -> dict[str | float, float]:
    return {_MESSAGE.spell(size): share for size, share in curve}


def _spell_numbers(curve: RateCurve) -> dict[int, float]:
    return {int(size): share for size, share in curve}


def _number(value: object) -> float:
    """A whole number, which may be text in JSON."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError(f"whole numbers of 1 or more as sizes, found {value!r}")
    return number


# A message of twice the bytes takes at least as long; more hosts or disks may each reach any share.
MessageShares = Annotated[
    RateCurve,
    BeforeValidator(curve_reader(units.SHARE, 1.0, units.parse_bytes, "message")),
    AfterValidator(_check_at_most_all),
    PlainSerializer(_spell_bytes, when_used="json"),
]
NumberShares = Annotated[
    RateCurve,
    BeforeValidator(curve_reader(units.SHARE, math.inf, _number)),
    AfterValidator(_check_at_most_all),
    PlainSerializer(_spell_numbers, when_used="json"),
]


def share_at(curve: RateCurve | None, size: float) -> float:
    """The share of the rate at a size; all of it without a curve."""
    return 1.0 if curve is None else interpolate(curve, size)
