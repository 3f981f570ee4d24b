"""The most common blocks that keep their saved tensors: never fewer than in a partition, and no fractions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.partition_mip.problem import MipProblem
from penstock.passes.partition_mip.proof.limits import ANY_LARGEST, BlockLimits, Largest
from penstock.passes.partition_mip.proof.most_kept import NONE, MostKept
from penstock.passes.partition_mip.recurrence import _on, contended_s, residents
from penstock.tests.passes.partition_mip.mip_instances import alike, problem, small_problems
from penstock.tests.shown_elsewhere import slow_but


def check_partitions(p: MipProblem) -> int:
    """Of all partitions whose devices are resident, whatever is known of their largest stages; returns how many there
    are."""
    limits, n, number = BlockLimits(p), len(p.units), 0
    most = MostKept(limits)
    for count in range(n, p.num_blocks + 1):
        for inner in itertools.combinations(range(1, p.num_blocks), count - 1):
            cuts = (0, *inner, p.num_blocks)
            seconds = contended_s(p, cuts)
            if seconds == math.inf or not all(residents(p, cuts)):
                continue
            number += 1
            again = {j for d in range(n) for j in p.placed[_on(cuts, d, n)][1]}
            common = [p.kinds[a:b].count(limits.common) for a, b in itertools.pairwise(cuts)]
            kept = sum(blocks for j, blocks in enumerate(common) if j not in again)
            whole, cutoff_s = max(common), seconds * (1 + 1e-9)
            known = [ANY_LARGEST, Largest(1, whole)]
            for least in range(1, whole + 1):
                reruns = any(common[j] >= least for j in again)
                known += [Largest(least, whole, reruns), Largest(least, None, reruns)]
            for largest in known:
                assert most.of(count, largest, cutoff_s) >= kept, (cuts, largest)
    return number


@settings(max_examples=8, deadline=None)
@given(small_problems(most_blocks=7), st.booleans())
def test_no_partition_keeps_more(p: MipProblem, same: bool) -> None:
    check_partitions(alike(p) if same else p)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(small_problems(most_blocks=9), st.booleans())
def test_none_of_many_partitions_keeps_more(p: MipProblem, same: bool) -> None:
    check_partitions(alike(p) if same else p)


def one_device(budget: float, blocks: int = 11) -> MipProblem:
    """Layers of 0.1 GB, each of which keeps as much for each micro-batch."""
    return problem([0] * blocks, [1.0], [0], [budget], micro_batches=8, weights=(0.1,), state_bytes=1.0)


@pytest.mark.parametrize("budget", slow_but([7.5], [5.9, 7.5]))
def test_no_partition_into_many_stages_of_a_device_keeps_more(budget: float) -> None:
    assert check_partitions(one_device(budget)) > 500


def test_the_largest_stages_of_many_run_again() -> None:
    """Of 11 layers in 10 stages of a device, four at most keep their tensors. Then the stage of two runs again, as what
    frees the most does; of 6 layers in 5 stages, it need not."""
    p, keeps = one_device(5.9), Largest(2, 2, False)
    most = MostKept(BlockLimits(p))
    assert 0 < most.of(10, ANY_LARGEST, math.inf) <= 4
    assert most.of(10, keeps, math.inf) == NONE
    assert most.of(11, keeps, math.inf) == most.of(11, ANY_LARGEST, math.inf)
    few = MostKept(BlockLimits(one_device(4.0, 6)))
    assert 2 <= few.of(5, keeps, math.inf) <= 4


def test_whole_blocks_are_fewer_than_fractions() -> None:
    """48 layers on eight devices: six leave room for 2.9 that keep their tensors, and take 197 s with two of these;
    seven take longer. With fewer stages there is room for three, but stages of two layers keep both or none."""
    p = problem(
        [0] * 48, [1.0] * 8, [0, 1] * 4, [15.8] * 8, micro_batches=8, weights=(1.0,), state_bytes=2.0, rate=50.0
    )
    most = MostKept(BlockLimits(p))
    assert most.of(40, ANY_LARGEST, 230.0) == 8 * 2 < most.of(40, ANY_LARGEST, math.inf)
    assert most.of(24, ANY_LARGEST, 230.0) == 8 * 3
    assert most.of(24, Largest(2, 2), 230.0) == 8 * 2
    assert most.of(40, ANY_LARGEST, 190.0) == NONE
