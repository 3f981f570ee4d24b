"""The report of a step: learning rates and the gradients' norm, and reports of ended steps without waiting."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import WorkerError
from penstock.runtime.processes.driver import Driver
from penstock.runtime.stage.store import StageStore
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, zoo_case

STEPS = 5
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
GROUPS = [{"params": ["*.bias"], "lr": 4e-3}]
HALVED = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def compile_job(num_devices: int = 1, **options: Any) -> tuple[Job, nn.Module, dict[str, torch.Tensor]]:
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="250kB", dram="1GB")
    chosen = {"optimizer": ADAMW, "param_groups": GROUPS, "lr_scheduler": HALVED, **options}
    return (
        penstock.compile(
            model, hardware, example_inputs=batch, micro_batches=MICRO_BATCHES, strategy="balanced", **chosen
        ),
        model,
        batch,
    )


def expected_rates(step: int) -> list[float]:
    """The rates of both groups, exactly as the schedule multiplies them."""
    return [rate * 0.5 ** (step - 1) for rate in (1e-3, 4e-3)]


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=[pytest.mark.multi, pytest.mark.slow])])
def test_reports_are_handed_out_by_the_next_step(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the end of a step for that: only the first step is seen to its end."""
    job, _, batch = compile_job(num_devices, max_grad_norm=1e9)
    waited: list[int] = []
    kind = type(job.driver)
    finish = kind.finish_step

    def note(driver: Driver) -> dict[str, Any]:
        waited.append(job.step_count)
        return finish(driver)

    monkeypatch.setattr(kind, "finish_step", note)
    losses, taken = [], []
    assert job.take_reports() == []
    for step in range(1, STEPS + 1):
        losses.append(float(job.step(batch)))
        found = job.take_reports()
        taken += found
        assert [report.step for report in found] == {1: [1], 2: []}.get(step, [step - 1])
    assert waited == [1]
    job.close()
    taken += job.take_reports()
    assert [report.step for report in taken] == list(range(1, STEPS + 1))
    assert [report.loss for report in taken] == losses
    for report in taken:
        assert sorted(report.learning_rates) == pytest.approx(expected_rates(report.step), rel=1e-12)
        assert report.gradient_norm is not None and report.gradient_norm > 0
        assert report.seconds > 0 and sum(report.moved_bytes.values()) > 0 and report.busy_share
    assert job.take_reports() == []


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=[pytest.mark.multi, pytest.mark.slow])])
def test_the_seconds_of_a_step_are_its_own(num_devices: int) -> None:
    """Not those of the step in which its report is asked for, nor of what the script does in between."""
    job, _, batch = compile_job(num_devices)
    began_s = time.perf_counter()
    for step in range(STEPS):
        job.step(batch)
        if step == 2:
            time.sleep(0.5)
    job.close()
    took_s, taken = time.perf_counter() - began_s, job.take_reports()
    for report in taken:
        shares = [share for row in report.busy_share.values() for share in row.values()]
        assert 0.1 < max(shares) <= 1.0, (report.step, report.busy_share)
    assert sum(report.seconds for report in taken) < took_s - 0.5


@pytest.mark.slow
def test_the_report_is_the_same_whether_the_next_step_or_last_asks_for_it() -> None:
    asked, _, batch = compile_job()
    waiting, _, _ = compile_job()
    with asked, waiting:
        for _ in range(STEPS):
            asked.step(batch)
            _ = asked.last
            waiting.step(batch)
        _ = waiting.last
        for one, other in zip(asked.take_reports(), waiting.take_reports(), strict=True):
            for name in ("step", "loss", "learning_rates", "moved_bytes", "peak_bytes", "gradient_norm"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.gradient_norm is None  # nothing clips, so nothing computes it


@pytest.mark.slow
def test_a_step_that_broke_off_leaves_no_report_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """After resuming, the step of which only the loss was known is gone, and reports go on."""
    job, _, batch = compile_job()
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        update = StageStore.update

        def fail(*args: Any, **fields: Any) -> None:
            raise ArithmeticError("no such update")

        monkeypatch.setattr(StageStore, "update", fail)
        with pytest.raises(WorkerError, match="no such update"):
            job.step(batch)
            job.step(batch)
        monkeypatch.setattr(StageStore, "update", update)
        job.resume(tmp_path / "checkpoint")
        job.step(batch)
        job.step(batch)
        _ = job.last
        assert [report.step for report in job.take_reports()] == [1, 2, 3]
