"""Chooses the stages of a device that run their forward again, so that the tensors that others keep for backward fit.

In: per stage the seconds of a forward that runs again; what is missing at some moments of a step if none does, and what
each stage that does leaves free then. Out: the stages to rematerialise. `insert-remat` decides by a device's program,
`partition-mip` by the numbers of its problem.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TOGETHER = 8  # stages of which all sets are compared; of more, the largest are rematerialised first
ROUNDING = 0.5  # of a byte: the order of a sum rounds it
ALIKE = 1e-3  # of the longest forward: sets whose seconds differ by less take as long


def cheapest_again(
    seconds: Sequence[float], missing_bytes: Sequence[float], frees_bytes: Sequence[Sequence[float]]
) -> list[int] | None:
    """The stages, in their order, whose forwards take the least seconds and leave enough free; of sets that take
    equally long, one of the fewest and latest stages: backward meets these first, on all devices alike.
    `missing_bytes`: by moment, above 0 where memory is short; `frees_bytes`: by moment and stage. None where all stages
    are not enough."""
    if max(missing_bytes, default=0.0) <= 0:
        return []
    again, enough = cheapest_of_many(*(np.array(rows)[None] for rows in (seconds, missing_bytes, frees_bytes)))
    return np.flatnonzero(again[0]).tolist() if enough[0] else None


def cheapest_of_many(seconds: Array, missing_bytes: Array, frees_bytes: Array) -> tuple[Array, Array]:
    """`cheapest_again` of many devices with equally many stages, all of which lack memory: whether each stage runs
    again, [device, stage]; and where all are enough, [device]. `missing_bytes`: [device, moment]; `frees_bytes`:
    [device, moment, stage]."""
    count = seconds.shape[1]
    free = np.broadcast_to(np.arange(count), seconds.shape)
    forced, possible = np.zeros(seconds.shape, bool), np.ones(len(seconds), bool)
    if count > TOGETHER:
        order = count - 1 - np.argsort(-frees_bytes.max(axis=1)[:, ::-1], axis=1, kind="stable")
        freed = np.cumsum(np.take_along_axis(frees_bytes, order[:, None], 2), axis=2)
        enough = np.all(freed >= missing_bytes[:, :, None], axis=1)
        first = surely_again(count, enough.argmax(axis=1) + 1)
        forced = np.argsort(order, axis=1) < first[:, None]
        free = np.sort(np.take_along_axis(order, first[:, None] + np.arange(TOGETHER), 1), axis=1)
        missing_bytes = missing_bytes - (frees_bytes * forced[:, None]).sum(axis=2)
        possible = enough[:, -1]
    sets, ranks = _sets(free.shape[1])
    took = np.take_along_axis(seconds, free, 1)
    longest = took.max(axis=1, keepdims=True)
    spent = np.round(took @ sets.T / np.where(longest > 0, ALIKE * longest, 1.0)) * len(ranks) + ranks
    frees = frees_bytes if count <= TOGETHER else np.take_along_axis(frees_bytes, free[:, None], 2)
    spent[(frees @ sets.T < missing_bytes[:, :, None] - ROUNDING).any(axis=1)] = np.inf
    again = forced.copy()
    np.put_along_axis(again, free, sets[spent.argmin(axis=1)] > 0, 1)
    return again, possible & (spent.min(axis=1) < np.inf)


def surely_again(count: int, enough: Any) -> Any:
    """The number of those stages that free the most that run again whatever the seconds, where `enough` are enough."""
    return np.clip(enough - TOGETHER // 2, 0, max(0, count - TOGETHER))


@functools.cache
def _sets(number: int) -> tuple[Array, Array]:
    """All sets of `number` stages, as rows of 0 and 1, and their places in the order of the fewest and latest."""
    numbers = np.arange(2**number)
    sets = ((numbers[:, None] >> np.arange(number)) & 1).astype(float)
    ranks = np.empty(len(numbers))
    ranks[np.lexsort((-numbers, sets.sum(axis=1)))] = numbers
    return sets, ranks
