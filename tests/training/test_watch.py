"""A worker that is slow is seen while it trains, and the plan that is offered trains as eager PyTorch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.tests.training.slow_layers import SLOW_PID_FILE, batch_of, model
from penstock.training import watch as watching
from penstock.training.watch import LOOKED, WARM_STEPS, StragglerWatch

OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TIERS = "partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"


class Asked:
    """The answers to a `StragglerWatch`'s questions: steps of half a second, and from the 41st on an offer."""

    def __init__(self, offer: Any, devices: int = 2):
        self.folder = SimpleNamespace(interface=SimpleNamespace(world_size=devices))
        self.found, self.step_count = offer, 0
        self.looked: list[int] = []
        self.planned: list[int] = []

    def timeline(self) -> Any:
        self.looked.append(self.step_count)
        return SimpleNamespace(step_s=0.5)

    def of_all_ranks(self, value: Any) -> list[Any]:
        return [value]

    def offer(self, timelines: Any) -> Any:
        assert len(timelines) == LOOKED
        self.planned.append(self.step_count)
        return self.found if self.step_count > 40 else None


def watch_over(job: Asked, total_steps: int, steps: int = 200) -> list[int]:
    """The steps after which there was an offer."""
    watch, offered = StragglerWatch(job, total_steps), []  # type: ignore[arg-type]
    for _ in range(steps):
        job.step_count += 1
        if watch.offer_after_step() is not None:
            offered.append(job.step_count)
    return offered


def test_looks_are_rarer_and_rarer_and_end_with_an_offer() -> None:
    job = Asked(object())
    assert watch_over(job, total_steps=1000) == [75]
    assert job.planned == [15, 35, 75]
    assert job.looked == [*range(11, 16), *range(31, 36), *range(71, 76)]


def test_nothing_is_planned_where_it_would_not_come_back() -> None:
    """In the last 20 s of a run, and for a device that has none beside it."""
    job = Asked(object())
    assert watch_over(job, total_steps=50, steps=50) == [] and not job.planned
    alone = Asked(object(), devices=1)
    assert watch_over(alone, total_steps=1000) == [] and not alone.looked


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("mesh", ["mesh, ", ""], ids=["replicas", "pipeline"])
def test_a_slow_worker_leads_to_a_plan_that_goes_on_as_eager(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of all steps and the weights after the last, before and after the plan is taken: fp32 sums in another
    order."""
    slow = tmp_path / "slow"
    monkeypatch.setenv(SLOW_PID_FILE, str(slow))
    monkeypatch.setattr(watching, "OFFER_S", 0.0)
    hardware, losses, offer, total = penstock.Hardware.cpu(num_devices=2), [], None, WARM_STEPS + LOOKED + 1
    job = penstock.compile(
        model(), hardware, example_inputs=batch_of(0), optimizer=OPTIMIZER, strategy=f"coarsen, {mesh}{TIERS}",
        micro_batches=8,
    )  # fmt: skip
    with job:
        watch = StragglerWatch(job, total)
        losses.append(float(job.step(batch_of(0))))
        assert watch.offer_after_step() is None
        slow.write_text(str(job.driver.workers[1].process.pid))  # type: ignore[attr-defined]
        while offer is None and job.step_count < total - 1:
            losses.append(float(job.step(batch_of(job.step_count))))
            offer = watch.offer_after_step()
        assert offer is not None and list(offer.times) == ["cpu1"] and offer.gain_s > 0.05 * offer.before_s
        job.save(tmp_path / "checkpoint")
    plan, machine = offer.write(tmp_path / "offer")
    with penstock.compile(model(), machine, example_inputs=batch_of(0), optimizer=OPTIMIZER, plan=plan) as job:
        job.resume(tmp_path / "checkpoint")
        assert job.plan.hash == offer.plan.hash and job.step_count == len(losses)
        for _ in range(4):
            losses.append(float(job.step(batch_of(job.step_count))))
        trained = job.state_dict()
    eager = model()
    optimizer, expected = OPTIMIZER(eager.parameters()), []
    for step in range(len(losses)):
        optimizer.zero_grad()
        loss = eager(**batch_of(step))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
