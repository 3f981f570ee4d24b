"""Which stages of a device run their forward again, so that what the others keep for backward fits.

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
    """The stages, in their order, whose forwards take the least seconds and leave enough free; of sets that take as
    long, one of the fewest and latest stages: backward meets these first, on all devices alike. `missing_bytes`: by
    moment, above 0 where memory is short; `frees_bytes`: by moment and stage. None where all stages are not enough."""
    if max(missing_bytes, default=0.0) <= 0:
        return []
    missing, frees, took = np.array(missing_bytes), np.array(frees_bytes), np.array(seconds)
    if len(took) <= TOGETHER:
        return _cheapest(took, missing, frees)
    order = np.lexsort((-np.arange(len(took)), -frees.max(axis=0)))
    enough = np.all(np.cumsum(frees[:, order], axis=1) >= missing[:, None], axis=0)
    first = max(0, min(int(enough.argmax()) + 1 - TOGETHER // 2, len(order) - TOGETHER))
    forced, free = order[:first], np.sort(order[first : first + TOGETHER])
    some = _cheapest(took[free], missing - frees[:, forced].sum(axis=1), frees[:, free]) if enough[-1] else None
    return None if some is None else sorted([*forced.tolist(), *free[some].tolist()])


def _cheapest(took: Array, missing: Array, frees: Array) -> list[int] | None:
    """The cheapest of all sets."""
    sets, ranks = _sets(len(took))
    spent = np.round(sets @ took / (ALIKE * took.max() or 1.0)) * len(ranks) + ranks
    spent[~np.all(sets @ frees.T >= missing - ROUNDING, axis=1)] = np.inf
    best = int(spent.argmin())
    return [i for i in range(len(took)) if best >> i & 1] if spent[best] < np.inf else None


@functools.cache
def _sets(number: int) -> tuple[Array, Array]:
    """All sets of so many stages, as rows of 0 and 1, and their places in the order of the fewest and latest."""
    numbers = np.arange(2**number)
    sets = ((numbers[:, None] >> np.arange(number)) & 1).astype(float)
    ranks = np.empty(len(numbers))
    ranks[np.lexsort((-numbers, sets.sum(axis=1)))] = numbers
    return sets, ranks
