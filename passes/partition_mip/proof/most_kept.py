"""The most common blocks that keep their saved tensors, where devices and stages have whole blocks.

In: a problem's limits, a number of stages, what is known of the largest stage, and a step to be faster than. Out: a
number that no such partition exceeds whose devices all stay resident. A relaxation lets a device keep 5.1 blocks beside
the 12.5 that it has; whole blocks are 5 beside 12, or 4 beside 13. By device, for each number of common blocks that it
may have: the kept tensors must fit beside the rest; these blocks and the others must make its number of stages, none
larger than known; and the device works for all micro-batches of all of them within the step. Then the most of all
devices together, over all ways to divide the common blocks among them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...run_again import surely_again
from .closed_form import fastest
from .limits import BlockLimits, Largest

NONE = -math.inf  # there is no such partition
ROUNDING = 1e-9  # of a block


class MostKept:
    """Of one problem. `computed`: for how many numbers of stages so far."""

    def __init__(self, limits: BlockLimits):
        self.limits, p, at = limits, limits.p, limits.p.kinds.index(limits.common)
        self.p, self.at, self.n, self.m = p, at, len(p.units), p.micro_batches
        self.kept, self.grads = float(p.kept_bytes[at + 1] - p.kept_bytes[at]), np.diff(p.grad_bytes).tolist()
        self.again_s = [row[at + 1] - row[at] for row in p.again_s]
        self.passing_s = fastest(p.forward_s), fastest(p.backward_s)
        self.computed = 0
        self.of = functools.lru_cache(maxsize=None)(self._compute)

    def _compute(self, count: int, largest: Largest, cutoff_s: float) -> float:
        """In any partition into `count` stages, one a device at least, that is faster than the cutoff; `NONE`: there is
        none."""
        self.computed += 1
        length = self.limits.num_common
        found = np.full(length + 1, NONE)
        found[0] = 0.0
        for d in range(self.n):
            before, found = found, np.full(length + 1, NONE)
            for blocks, kept in _Device(self, d, count, largest).choices(cutoff_s):
                found[blocks:] = np.maximum(found[blocks:], before[: length + 1 - blocks] + kept)
        return float(found[length])


class _Device:
    """One device: its stages, and what its `ends` (blocks of other kinds that it is known to have) need."""

    def __init__(self, of: MostKept, d: int, count: int, largest: Largest):
        self.of, self.p, self.d, self.largest = of, of.p, d, largest
        self.stages, self.spare = range(d, count, of.n), of.p.num_blocks - count
        self.last = self.stages[-1] == count - 1
        self.num_after = (count - 1 - d) % of.n  # stages after its last one
        kinds, ends = of.p.kinds, ((0, d == 0), (of.p.num_blocks - 1, self.last))
        self.ends = [block for block, here in ends if here and kinds[block] != of.limits.common]

    def least(self, table: list[float], j: int) -> float:
        """The least of an amount by block that stage j has."""
        return min(table[j : j + self.spare + 1])

    def choices(self, cutoff_s: float) -> list[tuple[int, int]]:
        """(number of common blocks, how many of them keep their tensors at most), each that is possible."""
        numbers = np.arange(self.of.limits.num_common + 1)
        most = np.minimum(numbers, self.most_in_memory(numbers))
        found = []
        for blocks in np.flatnonzero((most >= 0) & (self.busy_s(numbers, most) < cutoff_s)).tolist():
            if not self.large_runs_again(blocks, int(most[blocks])):
                kept = next((k for k in range(int(most[blocks]), -1, -1) if self.makes_stages(k, blocks - k)), None)
                if kept is not None and self.busy_s(blocks, kept) < cutoff_s:
                    found.append((blocks, kept))
        return found

    def most_in_memory(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The most common blocks that may keep their tensors, by memory at the begin of the backward of the device's
        last stage, for each of these numbers of common blocks; negative where not even the blocks themselves fit."""
        p, limits, m, j = self.p, self.of.limits, self.of.m, self.stages[-1]
        room = p.units[self.d].budget_bytes - limits.floor
        room -= limits.scratches[-1] if self.last else self.least(limits.scratches, j)
        room -= m * math.fsum(self.least(limits.entering, i) for i in self.stages) + 2 * self.least(limits.entering, j)
        one = (m - 1) * self.of.kept + limits.added[self.of.at]
        room -= math.fsum(limits.lasting[i] for i in self.ends)
        room -= self.of.grads[-1] if self.last else self.least(self.of.grads, j)
        left = room - numbers * limits.lasting[self.of.at]
        return np.where(left < 0, NONE, np.floor(left / one + ROUNDING) if one > 0 else numbers)

    def makes_stages(self, kept: int, again: int) -> bool:
        """Whether `kept` blocks that keep their tensors and `again` that do not make the device's stages, some of which
        may have other blocks alone."""
        most = self.largest.most or self.of.limits.num_common
        smaller = self.largest.least - 1 if self.largest.reruns is False else most
        if again and smaller < 1:
            return False
        fewest = -(-kept // most) + (-(-again // smaller) if again else 0)
        others = self.p.num_blocks - self.of.limits.num_common
        return fewest <= len(self.stages) <= kept + again + others

    def large_runs_again(self, blocks: int, kept: int) -> bool:
        """Whether one of the largest stages runs again though none may. The device has some, if its stages are too few
        for smaller ones alone; and of many stages, those that free the most run again first (`run_again`)."""
        least, number = self.largest.least, len(self.stages)
        if self.largest.reruns is not False or blocks <= number * (least - 1):
            return False
        enough = next((few for few in range(number) if self.most_common_blocks(few, kept) >= blocks - kept), number)
        if surely_again(number, enough) == 0:
            return False
        others = {i for j in self.stages for i in range(j, j + self.spare + 1)}
        sizes = np.diff(self.p.kept_bytes)
        more = math.fsum(sizes[i] for i in others if self.p.kinds[i] != self.of.limits.common)
        return (self.of.m - 1) * least * self.of.kept > self.of.m * ((least - 1) * self.of.kept + more)

    def most_common_blocks(self, few: int, kept: int) -> int:
        """The most common blocks in `few` stages, if those with `least` of them or more keep all, at most `kept`."""
        least, most = self.largest.least, self.largest.most or kept
        large = range(min(few, kept // least) + 1)
        return max(min(kept, number * most) + (few - number) * (least - 1) for number in large)

    def busy_s(self, blocks: Any, kept: Any) -> Any:
        """The least seconds of a step in which the device has `blocks` common blocks: it works for all micro-batches,
        but not while the first one passes the stages before it, and the last one those after it, and back."""
        seconds, own_s = self.of.limits.seconds[self.d], 2 * self.p.units[self.d].own_s * len(self.stages)
        each_s = blocks * seconds[self.of.at] + (blocks - kept) * self.of.again_s[self.d]
        alone_s = math.fsum(math.fsum(s[: self.d]) + math.fsum(s[len(s) - self.num_after :]) for s in self.of.passing_s)
        return alone_s + self.of.m * (each_s + own_s + math.fsum(seconds[i] for i in self.ends))
