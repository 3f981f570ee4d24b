"""The order of unlike blocks in a relaxation: the part of each run of blocks before each cut.

In: a `CountModel` with its counts. Out: rows, and amounts that follow from where a cut is. A relaxation is a mean of
partitions, and so is each of its cuts. What a partition has before cut j, by run, is

    z_jr = the share of run r before cut j, from 0 to 1

with all of a run before any of the next one, so z_jr >= z_jr+1 in each partition, and in the mean. The next cut is at
least one block further: where run r and the next one are single blocks, z_j+1,r+1 >= z_jr; a longer one has one of
its blocks more, or one less before its end. An amount that is known by the cut's position (the message that crosses it,
the inputs and the workspace of the block after it) is at least its own least interpolation between the borders of
runs, which is linear in z.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mip


class PassedRuns:
    """[cut][run] the shares `z`, as variables of `counted.model`, 0 or 1 where they are known."""

    def __init__(self, counted: Any):
        self.runs: list[tuple[int, int]] = counted.runs
        self.z: list[list[Any]] = [[0.0] * len(self.runs)]
        for j, mine in enumerate(counted.counts):
            before, here = self.z[-1], list(self.z[-1])
            for r, x in mine.items():
                at, size = self.runs[r]
                low, high = (min(1.0, max(0.0, (cut - at) / size)) for cut in counted.stages.cuts(j + 1))
                here[r] = counted.model.add_var(lb=low, ub=high)
                counted.model += here[r] == before[r] + (1 / size) * x
            for r in range(len(here) - 1):
                if here[r] is not before[r] or here[r + 1] is not before[r + 1]:
                    counted.row(here[r], here[r + 1])
            self.z.append(here)
            if j >= counted.idle:
                self.goes_on(counted, before, here)

    def goes_on(self, counted: Any, before: Sequence[Any], here: Sequence[Any]) -> None:
        """The cut `here` is after `before`, by at least one block."""
        for r, (_, size) in enumerate(self.runs[:-1]):
            following = self.runs[r + 1][1]
            if isinstance(before[r], float) or isinstance(here[r + 1], float):
                continue
            if size == 1:
                counted.row(following * here[r + 1], before[r])
            elif following == 1:
                counted.row(here[r + 1], 1 - size * (1 - before[r]))

    def lower_mean(self, j: int, values: Sequence[float]) -> Any:
        """The mean of an amount over the partitions' cuts before stage j, from below. `values`: by cut position."""
        borders = [0, *(at + size for at, size in self.runs)]
        inside = [min(values[a + 1 : b], default=math.inf) for a, b in itertools.pairwise(borders)]
        least = [min([values[at], *inside[max(0, r - 1) : r + 1]]) for r, at in enumerate(borders)]
        return least[0] + mip.xsum((b - a) * z for a, b, z in zip(least, least[1:], self.z[j]) if a != b)
