"""Figures that are put together from steps: rates, the slowest device, a curve of any length."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock.tests.training.live.told import GIB, STEP_S, Clock, facts_of_run, record, tell
from penstock.training.live.curve import MOST_POINTS, Curve
from penstock.training.live.plot import bounds, braille
from penstock.training.live.state import RunState


def test_rates_are_of_the_time_between_steps_and_the_step_of_the_devices() -> None:
    clock = Clock()
    state = RunState(clock)
    assert state.snapshot().phase == "preparing"
    state.begin(facts_of_run(done_steps=40))
    assert (state.snapshot().phase, state.snapshot().step, state.snapshot().loss) == ("training", 40, None)
    tell(state, clock, range(41, 42))
    first = state.snapshot()
    assert first.tokens_per_s == 4096 / STEP_S and first.remaining_s == pytest.approx(159 * STEP_S)
    tell(state, clock, range(42, 101))
    now = state.snapshot()
    assert (now.step, now.step_s, now.predicted_s) == (100, STEP_S, 0.048)
    assert now.tokens_per_s == pytest.approx(4096 / 0.06) and now.remaining_s == pytest.approx(100 * 0.06)
    assert now.loss == pytest.approx(sum(record(step).loss for step in range(81, 101)) / 20)
    assert now.curve == [(step, record(step).loss) for step in range(41, 101)]
    state.end(interrupted=True)
    assert state.snapshot().phase == "interrupted" and state.snapshot().version > now.version


def test_a_step_is_evaluated_once() -> None:
    state = RunState()
    for step, loss in ((10, 2.0), (20, 1.5), (20, 1.5)):  # the last step's own, and that after the run
        state.evaluated(step, {"loss": loss})
    assert state.snapshot().evaluations == [(10, {"loss": 2.0}), (20, {"loss": 1.5})]


def test_no_stream_is_busy_for_more_than_a_step() -> None:
    state = RunState()
    state.step(dataclasses.replace(record(1), busy_share={"gpu0": {"compute": 1.01}}))
    assert state.snapshot().busy_share == {"gpu0": {"compute": 1.0}}


def test_the_slowest_device_is_busiest_by_itself() -> None:
    """A receive that waits for the slowest counts for nothing; streams of one kind are one."""
    state = RunState()
    state.step(record(1))
    now = state.snapshot()
    assert now.busy_share["gpu1"]["recv"] == pytest.approx(0.6)
    assert now.slowest == ("gpu0", "compute", pytest.approx(0.8))


def test_peaks_are_those_of_the_run() -> None:
    state = RunState()
    state.step(record(1))
    state.step(record(2, num_devices=1))
    assert state.snapshot().peak_bytes == {"gpu0": 18 * GIB, "gpu1": 17 * GIB, "dram0": 120 * GIB, "ssd0": 0}


@pytest.mark.parametrize("count", [1, MOST_POINTS - 1, MOST_POINTS, 5 * MOST_POINTS + 3])
def test_a_curve_keeps_its_ends_and_its_mean(count: int) -> None:
    curve = Curve()
    for step in range(count):
        curve.add(step, 2.0 * step)
    points = curve.points()
    assert len(points) <= MOST_POINTS and points[0][0] == 0
    starts = [x for x, _ in points]
    assert starts == sorted(set(starts))
    for (x, y), after in zip(points, [*starts[1:], count]):
        assert y == sum(2.0 * step for step in range(int(x), int(after))) / (after - x)


def test_braille_draws_from_the_highest_to_the_lowest_and_joins_steep_parts() -> None:
    assert braille([(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)], 2, 1) == ["⠑⢄"]
    assert braille([(0, 1.0), (1, 0.0)], 1, 2) == ["⢱", "⢸"]
    assert braille([(0, 5.0)], 3, 1) == ["⠉⠉⠉"]
    assert braille([], 2, 2) == ["⠀⠀", "⠀⠀"]
    falling = braille([(0, 1.0), (1, math.nan), (2, 0.0), (3, math.inf)], 4, 3)
    assert falling == braille([(0, 1.0), (2, 0.0)], 4, 3)
    assert bounds([(0, math.nan), (1, 2.0), (2, -1.0)]) == (-1.0, 2.0) and bounds([]) == (0.0, 0.0)
