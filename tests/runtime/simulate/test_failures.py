"""Failures, drawn and in closed form."""

from __future__ import annotations

import math
import random

import pytest

from penstock.runtime.simulate.failures import FailingRun, draw_failures

RUNS = [
    FailingRun(3600.0, 10.0, 0.0, 0.0),
    FailingRun(3600.0, 10.0, 0.0, 600.0),
    FailingRun(3600.0, 10.0, 60.0, 600.0),
    FailingRun(1e5, 1.0, 30.0, 300.0),
    FailingRun(500.0, 40.0, 50.0, 400.0),
]


def walk_run(run: FailingRun, interval_s: float, failures: int) -> float:
    """The useful share of a run that is walked through event by event, with a save at a time."""
    draw = random.Random(1)
    at_s, kept_s, next_s, failed = 0.0, 0.0, draw.expovariate(1 / run.mtbf_s), 0
    waiting = None  # the steps of the save that is being written
    while failed < failures:
        turn_s = interval_s + run.stall_s
        if waiting is not None and at_s + run.write_s <= next_s:
            kept_s, waiting = kept_s + waiting, None
        if at_s + turn_s <= next_s:
            at_s, waiting = at_s + turn_s, interval_s
            continue
        failed, waiting, at_s = failed + 1, None, next_s
        while True:  # restarts
            next_s = at_s + draw.expovariate(1 / run.mtbf_s)
            if at_s + run.restart_s <= next_s:
                at_s += run.restart_s
                break
            at_s = next_s
    return kept_s / at_s


@pytest.mark.parametrize("run", RUNS)
def test_drawn_failures_take_what_the_closed_form_says(run: FailingRun) -> None:
    for factor in (0.5, 1.0, 2.0):
        interval_s = max(factor * run.best_interval_s, run.write_s)
        shares = draw_failures(run, interval_s, failures=400_000)
        assert shares.useful == pytest.approx(run.useful_share(interval_s), rel=0.01)
        assert shares.useful + shares.saves + shares.lost + shares.restarts == pytest.approx(1.0)
        assert min(shares.saves, shares.lost, shares.restarts) >= 0.0
        failures = int(min(4000, 60_000 * interval_s / run.mtbf_s))
        assert walk_run(run, interval_s, failures) == pytest.approx(shares.useful, rel=0.06)


@pytest.mark.parametrize("run", RUNS)
def test_no_interval_is_better_than_the_best(run: FailingRun) -> None:
    best_s = run.best_interval_s
    least_s = max(1e-3, run.write_s - run.stall_s)
    others = [run.useful_share(max(least_s, best_s * 2 ** (k / 8))) for k in range(-32, 33)]
    assert max(others) <= run.useful_share(best_s) * (1 + 1e-12)
    count = run.best_steps(7.0)
    shares = {n: run.useful_share(7.0 * n) for n in range(max(1, math.ceil(least_s / 7.0)), 2 * count + 10)}
    assert shares[count] == max(shares.values())


def young_s(run: FailingRun) -> float:
    """Young's interval: the best one as long as failures are much rarer than saves."""
    return math.sqrt(2 * run.stall_s * run.mtbf_s)


def test_the_best_interval_is_youngs_where_failures_are_rare() -> None:
    run = FailingRun(1e7, 5.0, 0.0, 60.0)
    assert run.best_interval_s == pytest.approx(young_s(run), rel=1e-3)
    # Daly's higher order, for more frequent ones.
    often = FailingRun(2000.0, 30.0, 0.0, 60.0)
    share = often.stall_s / (2 * often.mtbf_s)
    daly_s = young_s(often) * (1 + math.sqrt(share) / 3 + share / 9) - often.stall_s
    assert often.best_interval_s == pytest.approx(daly_s, rel=1e-3) and young_s(often) > 1.05 * daly_s


def test_a_machine_that_fails_at_once_makes_no_progress() -> None:
    assert FailingRun(1.0, 10.0, 0.0, 3600.0).useful_share(100.0) == 0.0
    for run in (FailingRun(1e-3, 10.0, 0.0, 3600.0), FailingRun(30.0, 10.0, 0.0, 3600.0)):
        assert 0.0 <= run.best_interval_s <= run.mtbf_s and run.best_steps(7.0) >= 1
        shares = draw_failures(run, 7.0)
        assert shares.useful == 0.0 and shares.restarts == pytest.approx(1.0)
