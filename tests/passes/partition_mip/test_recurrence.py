"""The recurrences against a schedule of every micro-batch, and against arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.partition_mip.problem import MipProblem
from penstock.passes.partition_mip.proof.limits import BlockLimits
from penstock.passes.partition_mip.proof.model import CountModel
from penstock.passes.partition_mip.recurrence import contended_s, fits, literal_s, residents
from penstock.tests.passes.partition_mip.mip_instances import problem, small_problems


def all_micro_batches_s(p: MipProblem, cuts: Sequence[int]) -> float:
    """The literal objective with a time for each micro-batch of each stage (Mobius eq. 3 to 11)."""
    n, count, m = len(p.units), len(cuts) - 1, p.micro_batches
    slices = list(pairwise(cuts))
    w = [p.weight_bytes[b] - p.weight_bytes[a] for a, b in slices]
    need = [w[j] + p.work_bytes[b][a] for j, (a, b) in enumerate(slices)]

    def seconds(sums: list[list[float]], j: int) -> float:
        return sums[j % n][slices[j][1]] - sums[j % n][slices[j][0]]

    def message(j: int, k: int) -> float:
        a, b = j % n, k % n
        return p.message_latency_s[a][b] + p.message_bytes[cuts[max(j, k)]] * p.message_s[a][b]

    forward = [seconds(p.forward_s, j) for j in range(count)]
    back = [seconds(p.backward_s, j) + seconds(p.again_s, j) for j in range(count)]
    ends: dict[tuple[str, int, int], float] = {}
    for kind, took, order, step in (("f", forward, range(count), 1), ("b", back, range(count)[::-1], -1)):
        for j in order:
            before, same = j - step, j - step * n
            for i in range(m):
                begin = ends.get((kind, j, i - 1), 0.0)
                if (kind, before, i) in ends:
                    begin = max(begin, ends[kind, before, i] + message(before, j))
                if i == 0 and kind == "b" and j + n >= count:
                    begin = max(begin, ends["f", j, m - 1])
                if i == 0 and (kind, same, 0) in ends:
                    fetch_s = p.units[j % n].fetch_s
                    late = max(0.0, w[j] + need[same] - p.units[j % n].budget_bytes)
                    begin = max(begin, ends[kind, same, m - 1] + late * fetch_s)
                    begin = max(begin, ends[kind, same, 0] - took[same] + w[j] * fetch_s)
                ends[kind, j, i] = begin + took[j]
    return ends["b", 0, m - 1]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(small_problems(), st.data())
def test_first_and_last_micro_batch_are_enough(p: MipProblem, data: st.DataObject) -> None:
    """The longest path needs no micro-batch between (messages are shorter than stages here)."""
    inner = data.draw(st.sets(st.integers(1, p.num_blocks - 1)))
    cuts = (0, *sorted(inner), p.num_blocks)
    want = all_micro_batches_s(p, cuts) if fits(p, cuts) else math.inf
    assert literal_s(p, cuts) == pytest.approx(want, rel=1e-9)


def test_more_of_everything_never_helps() -> None:
    """Contention, late places and gradients only add to what computation takes."""
    free = problem([0] * 8, [1.0] * 2, [0, 1], [600.0] * 2, rate=1e6)
    slow = problem([0] * 8, [1.0] * 2, [0, 1], [30.0] * 2, rate=1.0)
    shared = problem([0] * 8, [1.0] * 2, [0, 0], [30.0] * 2, rate=1.0)
    cuts = (0, 2, 4, 6, 8)
    assert residents(free, cuts) == (True, True)
    assert residents(slow, cuts) == (False, False)
    assert contended_s(free, cuts) < contended_s(slow, cuts) < contended_s(shared, cuts)
    assert contended_s(problem([0] * 8, [1.0] * 2, [0, 0], [5.0] * 2), cuts) == math.inf


@settings(max_examples=50, deadline=None)
@given(small_problems(), st.booleans(), st.data())
def test_where_every_stage_runs_again_each_device_computes_that(p: MipProblem, swap: bool, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, p.num_blocks - 1)))
    cuts, n = (0, *sorted(inner), p.num_blocks), len(p.units)
    took_s = contended_s(dataclasses.replace(p, swap=swap, always=True), cuts)
    for d in range(n):
        stages = list(pairwise(cuts))[d::n]
        tables = (p.forward_s[d], p.backward_s[d], p.again_s[d])
        computed_s = sum(sums[b] - sums[a] for sums in tables for a, b in stages)
        assert took_s >= p.micro_batches * computed_s


def test_an_unequal_device_takes_its_own_time() -> None:
    one = problem([0] * 6, [1.0, 1.0], [0, 1], [600.0] * 2)
    other = problem([0] * 6, [1.0, 3.0], [0, 1], [600.0] * 2)
    assert contended_s(other, (0, 2, 6)) < contended_s(one, (0, 3, 6)) < contended_s(other, (0, 4, 6))


def test_both_directions_of_a_root_complex_share_it() -> None:
    """Four stages of 8 GB are uploaded, two of them once more, and four gradients of 8 GB leave at 1 GB/s in all; the
    host then updates the last 4 G parameters."""
    options = {"kinds": (2, 2, 2, 2), "speeds": (100.0, 100.0), "complexes": (0, 0), "budgets": (25.0, 25.0)}
    alone, shared = problem(**options), problem(**options, both=1.0)  # type: ignore[arg-type]
    cuts = (0, 1, 2, 3, 4)
    assert residents(shared, cuts) == residents(alone, cuts) == (False, False)
    assert contended_s(alone, cuts) == contended_s(problem(**options, both=2.0), cuts)  # type: ignore[arg-type]
    update_s = 4.0 * 0.2
    assert contended_s(shared, cuts) == pytest.approx(32.0 + 16.0 + 32.0 + 1e-3 + update_s)
    assert contended_s(alone, cuts) < 70.0
    model = CountModel(BlockLimits(shared), 4, [False, False], integer=True)
    model.model.optimize()
    assert model.model.objective_value == pytest.approx(contended_s(shared, cuts), rel=1e-4)


def test_a_norm_is_taken_where_gradients_lie() -> None:
    """Two resident stages of 4 GB each wait for both norms, clip, and step; memory takes 1e-11 s a byte."""
    options = {"kinds": (0, 0), "speeds": (1.0, 1.0), "complexes": (0, 1), "budgets": (600.0, 600.0)}
    plain, normed = (problem(**options, barrier=barrier) for barrier in (False, True))  # type: ignore[arg-type]
    cuts = (0, 1, 2)
    assert residents(normed, cuts) == (True, True)
    norm_s, clip_s, own_s, call_s = 4e9 * 1e-11, 2 * 4e9 * 1e-11, 1e-3, 1e-5
    assert contended_s(normed, cuts) == pytest.approx(contended_s(plain, cuts) + norm_s + clip_s + 2 * (own_s + call_s))


def test_backward_fetches_of_one_device_slow_the_last_forward_of_another() -> None:
    """Five stages of 8 GB on two devices of 25 GB under one root complex of 1 GB/s: after 4 fetches two at a time, the
    last stage's weights share it with those that the other device fetches again for its backward."""
    p = problem((2,) * 5, (1e3, 1e3), (0, 0), (25.0, 25.0))
    cuts = (0, 1, 2, 3, 4, 5)
    assert residents(p, cuts) == (False, False)
    # Stages 0 and 1 are there after 16 s, 2 and 3 after 32 s; then 4, and 1 again, come until 48 s. Gradients follow,
    # of stages 1 to 4 after their messages of 4 x 10 MB, and the update of the last 4 G parameters.
    assert contended_s(p, cuts) == pytest.approx(48.0 + 5 * 8.0 + 4 * 0.08 + 4 * 0.2, abs=0.2)
