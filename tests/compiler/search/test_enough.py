"""A search ends where nothing is left to gain."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

import penstock
from penstock.compiler.search import attempts
from penstock.compiler.search.trial import Skipped
from penstock.ir.errors import PlanError
from penstock.passes.work_limit import WorkDone
from penstock.tests.compiler.eager_baseline import SGD, zoo_case


def rivals(**options: Any) -> tuple[penstock.Job, Counter[str]]:
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(2, memory="64MB")
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, **options)
    return job, Counter(rival.reason for rival in job.plan.rivals)


@pytest.mark.slow
def test_a_short_run_is_not_worth_a_long_search() -> None:
    """What the best plan could still save in one step is less than any search takes."""
    short, of_short = rivals(steps=1)
    long, of_long = rivals(steps=10**9)
    assert of_short[Skipped.NOT_WORTH_IT.value] > 10 and not of_long[Skipped.NOT_WORTH_IT.value]
    assert short.simulate().step_s >= long.simulate().step_s
    made = [sum(rival.step_s is not None for rival in job.plan.rivals) for job in (short, long)]
    assert made[0] < made[1]


@pytest.mark.slow
def test_the_best_within_a_hundredth_of_the_bound_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    _, usual = rivals()
    assert not usual[Skipped.NEAR_BOUND.value]
    monkeypatch.setattr(attempts, "NEAR", 0.99)
    job, found = rivals()
    assert found[Skipped.NEAR_BOUND.value] > 10
    assert job.plan.predicted.step_s >= job.plan.predicted.bound_s


@pytest.mark.parametrize("steps", [0, -3, 1.5, True, "many"])
def test_a_number_of_steps_is_a_whole_number(steps: Any) -> None:
    with pytest.raises(PlanError, match="it is the number of steps of the run, 1 or more"):
        rivals(steps=steps)


def test_none_is_begun_that_would_end_late() -> None:
    """Once something fits. Before that, only the end of the time ends the search."""
    tried = attempts.Attempts.__new__(attempts.Attempts)
    tried.until_s, tried.longest_s, tried.best, tried.work = 10.0, 4.0, None, WorkDone(9.0)
    tried.gained_s, tried.plans, tried.patience = 4.0, 0, 1.0
    assert not tried.is_late
    tried.best = object()  # type: ignore[assignment]
    assert tried.is_late
    tried.work = WorkDone(5.0)
    assert not tried.is_late


def test_plans_that_gain_nothing_end_a_search_unless_it_was_to_be_long() -> None:
    tried = attempts.Attempts.__new__(attempts.Attempts)
    tried.until_s, tried.longest_s, tried.best = 1000.0, 0.0, object()  # type: ignore[assignment]
    tried.plans, tried.gained_s, tried.patience, tried.work = attempts.MOST_PLANS + 1, 5.0, 1.0, WorkDone(8.1)
    assert tried.reason_to_end is Skipped.NO_GAIN
    tried.work = WorkDone(7.9)  # not much longer than the last gain took
    assert tried.reason_to_end is None
    tried.work, tried.patience = WorkDone(100.0), 10.0
    assert tried.reason_to_end is None


@pytest.mark.slow
def test_a_search_under_load_ends_where_it_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan, by the same candidates, where every clock runs a hundred times faster; the limit is what ends
    both."""
    alone, of_alone = rivals(search_s=1.0)
    assert of_alone[Skipped.OUT_OF_TIME.value] > 5
    for clock in ("process_time", "perf_counter", "monotonic"):
        usual = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda usual=usual: 100 * usual())
    loaded, of_loaded = rivals(search_s=1.0)
    assert loaded.plan.hash == alone.plan.hash and of_loaded == of_alone
    assert [rival.name for rival in loaded.plan.rivals] == [rival.name for rival in alone.plan.rivals]
