"""Sizes, rates and times as people write them ("24GB", "13.1 GB/s", "142TFLOPS", "10us"), and back.

k, M, G, T are powers of 1000 and Ki, Mi, Gi, Ti powers of 1024; a small b is a bit, a large B a byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite, log10

from .errors import HardwareError

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZES = {f"{p}B": Decimal(f) for p, f in {**_DECIMAL, **_BINARY}.items()}
_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*")


class UnitError(HardwareError, ValueError):
    """A quantity that cannot be read. Also a ValueError, so that pydantic adds its key."""


@dataclass(frozen=True)
class Quantity:
    """One kind of amount: the suffixes people write for it, each with its factor to the plain number."""

    noun: str
    example: str
    units: dict[str, Decimal]
    shown: tuple[str, ...]  # suffixes used for output, largest first

    def parse(self, value: object) -> float:
        """The plain number of `value`: a number as it is, or text with or without a suffix.

        Raises UnitError for anything else, and for numbers that are not finite.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not isfinite(value):
                raise UnitError(f"{self.noun} must be finite, such as {self.example!r}, found {value!r}")
            return value
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise UnitError(f"not a {self.noun}: {value!r}; write a number with a unit, such as {self.example!r}")
        number, suffix = match.groups()
        if suffix and suffix not in self.units:
            raise UnitError(f"unknown unit {suffix!r} in {value!r}{self._nearest(suffix)}; write {self.example!r}")
        plain = float(Decimal(number) * (self.units[suffix] if suffix else 1))
        if not isfinite(plain):
            raise UnitError(f"{self.noun} too large: {value!r}")
        return plain

    def _nearest(self, suffix: str) -> str:
        same = [unit for unit in self.units if unit.lower() == suffix.lower()]
        return f" (did you mean {same[0]!r}?)" if same else ""

    def spell(self, value: float) -> str | float:
        """Text that parses back to exactly `value`, short where a suffix allows it, else the number itself."""
        exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
        for suffix in self.shown:
            scaled = exact / self.units[suffix]
            if 1 <= abs(scaled) < 10**5 and scaled == round(scaled, 3):
                text = f"{scaled.normalize():f}{suffix}"
                if self.parse(text) == value:
                    return text
        return value

    def format(self, value: float, digits: int = 3) -> str:
        """Rounded text for people: three significant digits and the suffix that fits."""
        for suffix in self.shown:
            factor = float(self.units[suffix])
            if abs(value) >= factor or suffix == self.shown[-1]:
                scaled = value / factor
                decimals = max(0, digits - len(str(int(abs(scaled)))))
                return f"{scaled:.{decimals}f} {suffix}"
        raise AssertionError("a quantity shows at least one suffix")


BYTES = Quantity("size", "24GB", _SIZES, ("TiB", "GiB", "MiB", "KiB", "B"))
RATE = Quantity(
    "rate",
    "13.1GB/s",
    {f"{unit}/s": factor for unit, factor in _SIZES.items()}
    | {f"{p}{bits}": Decimal(f) / 8 for p, f in _DECIMAL.items() for bits in ("b/s", "bit/s", "bps")},
    ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
)
FLOPS = Quantity(
    "compute rate",
    "142TFLOPS",
    {f"{p}{flop}": Decimal(f) for p, f in _DECIMAL.items() for flop in ("FLOPS", "FLOP/s", "FLOPs")},
    ("PFLOPS", "TFLOPS", "GFLOPS", "MFLOPS", "FLOPS"),
)
SHARE = Quantity("share", "0.9", {}, ())
SECONDS = Quantity(
    "time",
    "10us",
    {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}
    | {"min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)},
    ("s", "ms", "us", "ns"),
)
# Files prefer the unit in which a size is a round number: 1.5TB as much as 24GiB.
_BYTES_IN_FILES = Quantity("size", "24GB", _SIZES, ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"))


def parse_bytes(value: object) -> int:
    """Bytes of "24GB" (decimal), "22.5GiB" (binary) or a plain number, rounded to a whole byte."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return round(BYTES.parse(value))


def parse_rate(value: object) -> float:
    """Bytes per second of "13.1GB/s", "100Gb/s" (bits) or a plain number."""
    return float(RATE.parse(value))


def parse_flops(value: object) -> float:
    """Floating-point operations per second of "142TFLOPS" or a plain number."""
    return float(FLOPS.parse(value))


def parse_seconds(value: object) -> float:
    """Seconds of "10us" or a plain number."""
    return float(SECONDS.parse(value))


EXAMPLES: dict[Callable[[object], float], str] = {  # of what each function reads
    parse_bytes: BYTES.example, parse_rate: RATE.example, parse_flops: FLOPS.example, parse_seconds: SECONDS.example,
}  # fmt: skip


def spell_bytes(value: int) -> str | int:
    """A size for a file: parses back to exactly `value`."""
    text = _BYTES_IN_FILES.spell(value)
    return text if isinstance(text, str) else value


def short_bytes(num_bytes: int, *, up: bool = True) -> str:
    """Bytes as text that parses back, three digits rounded up, or down: "1.87TB"."""
    step = 10 ** max(0, int(log10(max(num_bytes, 1))) - 2)
    rounded = (-(-num_bytes // step) if up else num_bytes // step) * step
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if rounded >= factor:
            return f"{rounded / factor:g}{unit}"
    return f"{rounded}B"


def format_bytes(value: float) -> str:
    """A size for people, in binary units: "21.4 GiB"."""
    return BYTES.format(value)


def format_rate(value: float) -> str:
    """A rate for people: "13.1 GB/s"."""
    return RATE.format(value)


def format_flops(value: float) -> str:
    """A compute rate for people: "142 TFLOPS"."""
    return FLOPS.format(value)


def figure(value: float) -> str:
    """A number with at least three digits, and commas between thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_seconds(value: float) -> str:
    """A time for people: "41.2 ms"."""
    return SECONDS.format(value)


def time_text(seconds: float) -> str:
    """Seconds in the unit that people take: "35 s", "17 minutes", "18.0 hours", "75.0 hours (3.1 days)"."""
    hours = seconds / 3600
    if hours < 2:
        return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else format_seconds(seconds)
    return f"{hours:,.1f} hours" + (f" ({hours / 24:,.1f} days)" if hours >= 48 else "")
