"""`run_again`: the least seconds that leave enough free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.passes.run_again import TOGETHER, cheapest_again, cheapest_of_many, surely_again

stages = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=TOGETHER + 4)


@given(stages, st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 12)), min_size=1, max_size=3))
def test_nothing_cheaper_fits(rows: list[tuple[int, int]], moments: list[tuple[int, int]]) -> None:
    """Before its own moment, a stage has saved nothing yet that it could leave free."""
    seconds, missing = [s for s, _ in rows], [each for each, _ in moments]
    frees = [[size if i < begun else 0 for i, (_, size) in enumerate(rows)] for _, begun in moments]

    def fits(some: Sequence[int]) -> bool:
        return all(sum(mine[i] for i in some) >= least for least, mine in zip(missing, frees))

    found = cheapest_again(seconds, missing, frees)
    assert (found is None) == (not fits(range(len(rows))))
    if found is None:
        return
    assert fits(found) and found == sorted(found)
    took = sum(seconds[i] for i in found)
    if len(rows) <= TOGETHER:
        others = (o for n in range(len(rows) + 1) for o in itertools.combinations(range(len(rows)), n))
        assert not any(fits(other) for other in others if sum(seconds[i] for i in other) < took)
    largest = sorted(range(len(rows)), key=lambda i: (-max(mine[i] for mine in frees), -i))
    first = next(largest[:n] for n in range(len(rows) + 1) if fits(largest[:n]))
    assert took <= sum(seconds[i] for i in first)


@given(stages, st.integers(1, 100))
@example([(9, 9), *[(1, 8)] * 5], 40)  # so few that all sets are compared
def test_of_many_stages_those_that_free_the_most_run_again(rows: list[tuple[int, int]], missing: int) -> None:
    seconds, frees = [s for s, _ in rows], [size for _, size in rows]
    found = cheapest_again(seconds, [missing], [frees])
    if found is not None:
        largest = sorted(range(len(rows)), key=lambda i: (-frees[i], -i))
        enough = next(n for n in range(len(rows) + 1) if sum(frees[i] for i in largest[:n]) >= missing)
        assert {*largest[: surely_again(len(rows), enough)]} <= {*found}
        if enough <= TOGETHER // 2:  # no stage is rematerialised for its size alone
            sizes = range(1, min(len(rows), TOGETHER) + 1)
            sets = [some for size in sizes for some in itertools.combinations(largest[:TOGETHER], size)]
            cheapest = min(sum(seconds[i] for i in some) for some in sets if sum(frees[i] for i in some) >= missing)
            assert sum(seconds[i] for i in found) <= cheapest


@given(st.integers(1, TOGETHER + 3), st.integers(0, 10**6))
def test_many_devices_at_once_choose_as_each_alone(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    seconds = draw.integers(1, 9, (6, count)).astype(float)
    frees = draw.integers(0, 9, (6, 3, count)).astype(float)
    missing = draw.integers(1, 2 + 5 * count, (6, 3)).astype(float)
    again, possible = cheapest_of_many(seconds, missing, frees)
    for row in range(6):
        found = cheapest_again(seconds[row].tolist(), missing[row].tolist(), frees[row].tolist())
        assert possible[row] == (found is not None)
        assert found is None or np.flatnonzero(again[row]).tolist() == found


def test_stages_that_take_as_long_are_the_fewest_and_the_latest() -> None:
    assert cheapest_again([1.0, 1.0, 2.0, 1.0], [2], [[1, 1, 2, 1]]) == [2]
    assert cheapest_again([1.0] * 4, [2], [[1] * 4]) == [2, 3]
    assert cheapest_again([1.0] * 4, [2, 1], [[1, 1, 1, 0], [1, 0, 0, 0]]) == [0, 2]
    many = 3 * TOGETHER
    assert cheapest_again([1.0] * many, [2], [[1] * many]) == [many - 2, many - 1]
