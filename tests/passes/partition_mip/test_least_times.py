"""Lower bounds of many partitions at once against the recurrence of each."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.partition_mip.least_times import LeastTimes
from penstock.passes.partition_mip.problem import MipProblem
from penstock.passes.partition_mip.recurrence import contended_s, residents
from penstock.tests.passes.partition_mip.mip_instances import problem, small_problems


def all_partitions(p: MipProblem, count: int) -> list[tuple[int, ...]]:
    length = p.num_blocks
    return [(0, *inner, length) for inner in itertools.combinations(range(1, length), count - 1)]


@settings(max_examples=25, deadline=None)
@given(small_problems(most_blocks=7), st.booleans(), st.booleans(), st.booleans())
def test_no_partition_takes_less(p: MipProblem, swap: bool, always: bool, ordered: bool) -> None:
    p = dataclasses.replace(p, swap=swap, always=always, ordered=ordered)
    least_times = LeastTimes(p)
    for count in range(1, p.num_blocks + 1):
        rows = all_partitions(p, count)
        for cuts, least_s in zip(rows, least_times(rows)):
            seconds = contended_s(p, cuts)
            assert (least_s == math.inf) == (seconds == math.inf)
            if seconds < math.inf:
                assert 0.5 * seconds < least_s <= seconds * (1 + 1e-9)
                if all(residents(p, cuts)):
                    assert least_s == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("both", [None, 1.2])
@pytest.mark.parametrize("barrier", [False, True])
def test_devices_with_a_root_complex_each_wait_for_no_other(both: float | None, barrier: bool) -> None:
    """Devices of 25 GB fetch, and the one of 150 GB does not always; the bound is the objective."""
    p = problem([0, 0, 1, 2, 0, 0, 2, 1], [1.0, 1.7, 3.0], [0, 1, 2], [25.0, 150.0, 25.0], both=both, barrier=barrier)
    stays = set()
    for count in (4, 5, 6, 8):
        rows = all_partitions(p, count)
        seconds = np.array([contended_s(p, cuts) for cuts in rows])
        assert LeastTimes(p)(rows) == pytest.approx(seconds, rel=1e-9)
        stays |= {residents(p, cuts) for cuts, s in zip(rows, seconds) if s < math.inf}
    assert {(False, False, False), (False, True, False)} <= stays
