"""Ctrl-C during a call of a job: the call is finished, and the job goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import WorkerError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case
from penstock.tests.compiler.job.agents import agents

DEVICES = [1, pytest.param(2, marks=pytest.mark.multi)]


def job_of(num_devices: int) -> tuple[Job, Any]:
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=num_devices)
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy="balanced"
    ), batch


def raise_interrupt(job: Job, call: Callable[[], Any], times: int = 1, inside: str = "_run_all") -> None:
    """Make a call into which Ctrl-C comes as soon as the devices get a command."""
    driver, left = job.driver, [times]
    usual = getattr(driver, inside)

    def first_a_signal(*args: Any) -> Any:
        while left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return usual(*args)

    setattr(driver, inside, first_a_signal)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        setattr(driver, inside, usual)


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=[pytest.mark.multi, pytest.mark.slow])])
def test_ctrl_c_finishes_the_step_and_everything_goes_on(num_devices: int, tmp_path: Path) -> None:
    job, batch = job_of(num_devices)
    with job:
        losses = [float(job.step(batch)) for _ in range(4)]
        wanted = {name: tensor.clone() for name, tensor in job.state_dict().items()}
    job, batch = job_of(num_devices)
    with job:
        job.step(batch)
        raise_interrupt(job, lambda: job.step(batch))
        assert job.step_count == 2 and job.last is not None and job.last.loss == losses[1]
        raise_interrupt(job, lambda: job.evaluate(batch))
        raise_interrupt(job, lambda: job.save(tmp_path / "saved"), inside="call")
        raise_interrupt(job, job.sync, inside="call")
        assert all(torch.equal(job.model.state_dict()[name], tensor) for name, tensor in job.state_dict().items())
        assert float(job.step(batch)) == losses[2]
        raise_interrupt(job, lambda: job.resume(tmp_path / "saved"), inside="call")
        assert job.step_count == 2
        assert [float(job.step(batch)) for _ in range(2)] == losses[2:]
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in job.state_dict().items())


def test_a_second_ctrl_c_breaks_the_step_off(tmp_path: Path) -> None:
    job, batch = job_of(1)
    with job:
        losses = [float(job.step(batch)) for _ in range(2)]
        job.save(tmp_path / "saved")
        raise_interrupt(job, lambda: job.step(batch), times=2)
        with pytest.raises(WorkerError, match=r"KeyboardInterrupt.*job\.resume"):
            job.step(batch)
        job.resume(tmp_path / "saved")
        assert float(job.step(batch)) < losses[1]


@pytest.mark.slow
@pytest.mark.multi
def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    with agents(tmp_path, "interrupt", "1", "--slow", per_node=2) as running:
        assert running.wait(200) == [0], running.output()
        found = running.results()
    assert len({row["interrupted after"] for row in found.values()}) == 1
    assert found[0]["losses"] == found[1]["losses"] and len(found[0]["losses"]) == 5  # that step's is in `job.last`
