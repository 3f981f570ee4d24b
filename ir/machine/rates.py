"""A small table of the rates that a device reaches, by kind and size of a call, and the time of a mix of calls by it.

Each curve of a table is a few sizes with a rate each. Between two of them the rate follows a straight line in
logarithms of both; beyond the last size it stays. Products below the first size slow down as those before it, at least
in proportion to their size: such a product is one wave of tiles, whose time does not depend on how many tiles it has.

What a table leaves out is timed at the device's constant rates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from .. import units
from .call_mix import AttentionCall, CallMix, Product
from .part import Dtype, MachinePart

RateCurve = tuple[tuple[float, float], ...]  # (size, rate), sizes rising
STEEPEST = 3.0  # the power of its size by which a product's FLOPs grow
SLOWEST = 1.0


def interpolate(curve: RateCurve, size: float, below: float = 0.0) -> float:
    """The curve's rate at a size. `below`: the least power of the size by which rates fall before the first size."""
    place = bisect_left(curve, (size,))
    if place == len(curve):
        return curve[-1][1]
    if place == 0:
        first = curve[0]
        slope = max(below, _slope(first, curve[1])) if below and len(curve) > 1 else below
        return float(first[1] * (size / first[0]) ** min(STEEPEST, slope))
    before, after = curve[place - 1], curve[place]
    return float(before[1] * (size / before[0]) ** _slope(before, after))


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return math.log(after[1] / before[1]) / math.log(after[0] / before[0])


def curve_reader(
    quantity: units.Quantity, steepest: float, size_of: Callable[[object], float] | None = None, call: str = "call"
) -> Callable[[object], RateCurve]:
    """Reads a curve from a mapping of sizes to rates. `steepest`: the power of the size by which work grows; `size_of`
    reads a size that is not just a number; `call`: what has such a size."""
    read_size, noun = size_of or _size, quantity.noun.split()[-1]

    def read(value: object) -> RateCurve:
        if isinstance(value, tuple):
            value = dict(value)
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"a mapping from sizes to {noun}s, such as {{1024: {quantity.example}}}")
        points = sorted((read_size(size), quantity.parse(rate)) for size, rate in value.items())
        for size, rate in points:
            if not (size > 0 and rate > 0):
                raise ValueError(f"sizes and {noun}s above 0; at {size:g} the {noun} is {rate:g}")
        for before, after in pairwise(points):
            if before[0] == after[0]:
                raise ValueError(f"each size once; {before[0]:g} is given twice")
            if _slope(before, after) > steepest + 1e-9:
                raise ValueError(
                    f"no larger {call} that takes less time than a smaller one; the {noun}s {before[1]:g} at "
                    f"{before[0]:g} and {after[1]:g} at {after[0]:g} are such"
                )
        return tuple(points)

    return read


def _speller(quantity: units.Quantity) -> Callable[[RateCurve], dict[float, str | float]]:
    def spell(curve: RateCurve) -> dict[float, str | float]:
        return {int(size) if size == int(size) else size: quantity.spell(rate) for size, rate in curve}

    return spell


def _size(value: object) -> float:
    """A size, which may be text in JSON."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"sizes that are numbers, found {value!r}") from None


_FLOPS, _RATE = _speller(units.FLOPS), _speller(units.RATE)
# FLOPs of a product grow with the cube of its size, those of attention with the square of the length.
ProductCurve = Annotated[
    RateCurve, BeforeValidator(curve_reader(units.FLOPS, STEEPEST)), PlainSerializer(_FLOPS, when_used="json")
]
AttentionCurve = Annotated[
    RateCurve, BeforeValidator(curve_reader(units.FLOPS, 2.0)), PlainSerializer(_FLOPS, when_used="json")
]
TrafficCurve = Annotated[
    RateCurve, BeforeValidator(curve_reader(units.RATE, 1.0)), PlainSerializer(_RATE, when_used="json")
]


class AttentionRates(MachinePart):
    """FLOP/s of one backend of fused attention for one size of heads, by the number of keys."""

    backend: Literal["flash", "efficient"]
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)]
    head_size: Annotated[int, Field(gt=0)]
    forward: AttentionCurve
    backward: AttentionCurve


class RateTable(MachinePart):
    """The rates of a device by kind and size of a call.

    `products`: FLOP/s of matrix products by dtype and size, the cube root of m n k. `attention`: FLOP/s of fused
    attention. `pointwise`: bytes/s of calls that read and write, by the bytes of a call. `source` says where the
    figures come from, and which of them are derived.
    """

    source: Annotated[str, Field(min_length=1)]
    products: dict[Dtype, ProductCurve] = {}
    attention: tuple[AttentionRates, ...] = ()
    pointwise: TrafficCurve | None = None

    @model_validator(mode="after")
    def _check(self) -> RateTable:
        seen = set()
        for row in self.attention:
            for dtype in row.dtypes:
                if (key := (row.backend, dtype, row.head_size)) in seen:
                    raise ValueError(f"one row of attention per backend, dtype and head size; {key} has two")
                seen.add(key)
        return self

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        return self.model_dump_json()

    def document(self) -> dict[str, Any]:
        """The table as plain data, with numbers as the sizes of its curves."""
        found: dict[str, Any] = with_numbers(self.model_dump(mode="json", exclude_defaults=True))
        return found

    def scaled(self, factor: float) -> RateTable:
        """The table of a device that is `factor` times as fast in everything."""
        return RateTable(
            source=self.source,
            products={dtype: _times(curve, factor) for dtype, curve in self.products.items()},
            attention=tuple(
                row.model_copy(
                    update={"forward": _times(row.forward, factor), "backward": _times(row.backward, factor)}
                )
                for row in self.attention
            ),
            pointwise=None if self.pointwise is None else _times(self.pointwise, factor),
        )

    def highest(self, dtype: str) -> float | None:
        """The highest rate of products and attention in a dtype; None without any."""
        curves = [curve for name, curve in self.products.items() if name == dtype]
        curves += [curve for row in self.attention if dtype in row.dtypes for curve in (row.forward, row.backward)]
        return max((rate for curve in curves for _, rate in curve), default=None)


def with_numbers(value: Any) -> Any:
    """Plain data with keys that are whole numbers as numbers, which JSON cannot have."""
    if isinstance(value, list):
        return [with_numbers(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdigit() else key: with_numbers(each) for key, each in value.items()}


def _times(curve: RateCurve, factor: float) -> RateCurve:
    return tuple((size, rate * factor) for size, rate in curve)


@dataclass(frozen=True)
class ConstantRates:
    """A device's rates for what its table leaves out. `dtype` is that of the plan's computation."""

    flops: tuple[tuple[str, float], ...]
    bandwidth: float
    dtype: str

    def flops_of(self, dtype: str) -> float:
        known = dict(self.flops)
        return known.get(dtype, known[self.dtype])


@lru_cache(maxsize=1 << 16)
def mix_seconds(table: RateTable, constant: ConstantRates, mix: CallMix) -> tuple[float, float]:
    """Seconds of all calls of a mix, one after the other: of those that compute, and of those that read and write."""
    products = sum(row.count * _product_s(table, constant, row) for row in mix.products)
    attention = sum(row.count * _attention_s(table, constant, row) for row in mix.attention)
    other = mix.other_flops / constant.flops_of(constant.dtype)
    traffic = sum(row.count * row.bytes / _bandwidth(table, constant, row.bytes) for row in mix.pointwise)
    return products + attention + other, traffic


def peak_seconds(peak: ConstantRates, mix: CallMix) -> float:
    """Seconds of the FLOPs that no kernel spares, each at the peak of its dtype."""
    found = mix.other_flops / peak.flops_of(peak.dtype)
    found += sum(row.count * row.flops / peak.flops_of(row.dtype) for row in mix.products)
    return found + sum(row.count * row.least_flops / peak.flops_of(row.dtype) for row in mix.attention)


def _product_s(table: RateTable, constant: ConstantRates, product: Product) -> float:
    """A product takes what its FLOPs or its bytes take, whichever is longer (the roofline)."""
    curve = table.products.get(product.dtype or constant.dtype)  # type: ignore[call-overload]
    if curve is None:
        return product.flops / constant.flops_of(product.dtype) + product.bytes / constant.bandwidth
    rate = interpolate(curve, product.size, SLOWEST)
    return max(product.flops / rate, product.bytes / constant.bandwidth)


def _attention_s(table: RateTable, constant: ConstantRates, call: AttentionCall) -> float:
    """By the rows of the call's backend, else of any other, with rates interpolated between head sizes too."""
    rows = [row for row in table.attention if (call.dtype or constant.dtype) in row.dtypes]
    rows = [row for row in rows if row.backend == call.backend] or rows
    if not rows:
        return call.flops / constant.flops_of(call.dtype) + call.bytes / constant.bandwidth
    curves = [(float(row.head_size), row.backward if call.backward else row.forward) for row in rows]
    rates = sorted((size, interpolate(curve, call.keys, SLOWEST)) for size, curve in curves)
    rate = interpolate(tuple(dict(rates).items()), call.head_size)
    return max(call.computed_flops / rate, call.bytes / constant.bandwidth)


def _bandwidth(table: RateTable, constant: ConstantRates, num_bytes: float) -> float:
    return constant.bandwidth if table.pointwise is None else interpolate(table.pointwise, num_bytes)


def table_text(table: RateTable) -> Sequence[str]:
    """The table in a few lines."""
    lines = [f"products in {dtype} {_ends(curve, units.format_flops)}" for dtype, curve in table.products.items()]
    kinds = dict.fromkeys((row.backend, " and ".join(row.dtypes)) for row in table.attention)
    for kind in kinds:
        rows = [row for row in table.attention if (row.backend, " and ".join(row.dtypes)) == kind]
        most = [max(rate for row in rows for _, rate in curve(row)) for curve in (_forward, _backward)]
        forward, backward = map(units.format_flops, most)
        lines.append(f"{kind[0]} attention in {kind[1]} up to {forward} forward, {backward} backward")
    if table.pointwise is not None:
        lines.append(f"calls that read and write {_ends(table.pointwise, units.format_rate, units.format_bytes)}")
    return lines


def _forward(row: AttentionRates) -> RateCurve:
    return row.forward


def _backward(row: AttentionRates) -> RateCurve:
    return row.backward


def _ends(curve: RateCurve, text: Callable[[float], str], size_text: Callable[[int], str] = str) -> str:
    (first_size, first), (last_size, last) = curve[0], curve[-1]
    start = f"{text(first)} at {size_text(round(first_size))}"
    return start if len(curve) == 1 else f"{start} to {text(last)} at {size_text(round(last_size))}"
