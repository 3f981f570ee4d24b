"""The calls of a computation by kind and size, in which a device's table of rates is looked up.

A mix goes with the sums that it explains, FLOPs and bytes of traffic. A part of the computation (half of a
backward, a forward that is spared some calls) has smaller sums and the same mix: it runs at the mix's average rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

FLASH, EFFICIENT = "flash", "efficient"  # kernels of attention; any other way to compute it consists of other calls
ATTENTION_BACKWARD = 2.5  # FLOPs of attention's backward per FLOP of its forward: five products instead of two
LEAST_BACKWARD = 2.0  # of which one product makes the scores again, which a kernel may have kept
FP8 = "fp8"
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, FP8: 1}
LEAST_RESULT_BYTES = 2  # of an element: no product here writes float8


@dataclass(frozen=True)
class Product:
    """`count` calls of one shape, each of which multiplies `batch` times an m x k by a k x n matrix.

    `dtype` is that of the operands, empty for one that no table of rates knows.
    """

    dtype: str
    m: int
    n: int
    k: int
    batch: int = 1
    count: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one call."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Bytes that one call reads and writes."""
        each = DTYPE_BYTES.get(self.dtype, 4)
        read, written = self.m * self.k + self.k * self.n, self.m * self.n
        return float(self.batch * (read * each + written * max(each, LEAST_RESULT_BYTES)))

    @property
    def size(self) -> float:
        """The side of the cube with the same number of multiplications; a batch counts like more rows."""
        return float(np.cbrt(float(self.batch * self.m * self.n * self.k)))


@dataclass(frozen=True)
class AttentionCall:
    """`count` calls of fused attention of one shape. `heads` are those of all rows of the micro-batch; with `causal`,
    half of the scores are not computed."""

    backend: str
    dtype: str
    heads: int
    queries: int
    keys: int
    head_size: int
    causal: bool = False
    backward: bool = False
    count: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one call as torch counts them: all scores, also those that `causal` spares."""
        forward = 4.0 * self.heads * self.queries * self.keys * self.head_size
        return forward * (ATTENTION_BACKWARD if self.backward else 1.0)

    @property
    def computed_flops(self) -> float:
        """FLOPs that the kernel computes."""
        return self.flops * (0.5 if self.causal else 1.0)

    @property
    def least_flops(self) -> float:
        """FLOPs that any kernel computes."""
        return self.computed_flops * (LEAST_BACKWARD / ATTENTION_BACKWARD if self.backward else 1.0)

    @property
    def bytes(self) -> float:
        """Bytes that one call reads and writes: four tensors in forward, eight in backward."""
        elements = 2 * self.heads * (self.queries + self.keys) * self.head_size
        return float(elements * DTYPE_BYTES.get(self.dtype, 4) * (2 if self.backward else 1))


@dataclass(frozen=True)
class PointwiseCall:
    """`count` calls that do little more than read and write, `bytes` each."""

    bytes: int
    count: int = 1


CallRow = TypeVar("CallRow", Product, AttentionCall, PointwiseCall)


@dataclass(frozen=True)
class CallMix:
    """The calls of one computation. `other_flops` are those of calls of other kinds, convolutions for example;
    `traffic_bytes` is what all calls read and write, products included, as the sum beside the mix counts it."""

    products: tuple[Product, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    pointwise: tuple[PointwiseCall, ...] = ()
    other_flops: float = 0.0
    traffic_bytes: float = 0.0

    def __hash__(self) -> int:
        return hash((self.traffic_bytes, self.other_flops, len(self.products), len(self.pointwise)))

    @cached_property
    def is_empty(self) -> bool:
        return self == NO_CALLS

    @cached_property
    def flops(self) -> float:
        """FLOPs of all calls, as torch counts them."""
        return self.other_flops + flops_of(self.products) + flops_of(self.attention)

    @cached_property
    def float8_share(self) -> float:
        """The fraction of the FLOPs that are products in float8."""
        low = flops_of(row for row in self.products if row.dtype == FP8)
        return low / self.flops if low else 0.0


NO_CALLS = CallMix()


def flops_of(rows: Iterable[Product] | Iterable[AttentionCall]) -> float:
    """FLOPs of all calls of the rows, as torch counts them."""
    return sum(row.count * row.flops for row in rows)


def merge_mixes(mixes: Iterable[CallMix]) -> CallMix:
    """All calls of several computations, equal ones in one row."""
    return _merge_times(tuple(Counter(mixes).items()))  # few distinct ones among many, as equal blocks share theirs


@lru_cache(maxsize=1 << 12)
def _merge_times(times: tuple[tuple[CallMix, int], ...]) -> CallMix:
    """All calls of computations that are each made a number of times."""
    return CallMix(
        merge_rows((row, n) for mix, n in times for row in mix.products),
        merge_rows((row, n) for mix, n in times for row in mix.attention),
        merge_rows((row, n) for mix, n in times for row in mix.pointwise),
        sum(n * mix.other_flops for mix, n in times),
        sum(n * mix.traffic_bytes for mix, n in times),
    )


@lru_cache(maxsize=1 << 12)
def both(first: CallMix, second: CallMix) -> CallMix:
    """All calls of two computations, of a rematerialisation and a backward for example."""
    return merge_mixes((first, second))


def merge_rows(rows: Iterable[tuple[CallRow, int]]) -> tuple[CallRow, ...]:
    """Merge the rows of equal calls, each with its number of times."""
    found: Counter[CallRow] = Counter()
    for row, times in rows:
        found[_times(row, 1)] += row.count * times
    return tuple(_times(row, count) for row, count in found.items())


def _times(row: CallRow, count: int) -> CallRow:
    return row if row.count == count else replace(row, count=count)
