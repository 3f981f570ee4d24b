"""Signals during a call of a job: the call is finished, and the job goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.job import one_call
from penstock.compiler.job.job import Job
from penstock.ir.errors import PlanError, WorkerError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case
from penstock.tests.compiler.job.agents import agents

DEVICES = [1, pytest.param(2, marks=pytest.mark.multi)]


def job_of(num_devices: int) -> tuple[Job, Any]:
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=num_devices)
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy="balanced"
    ), batch


def raise_interrupt(
    job: Job,
    call: Callable[[], Any],
    times: int = 1,
    inside: str = "_run_all",
    number: int = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Make a call into which Ctrl-C, or another signal, comes as soon as the devices get a command."""
    driver, left = job.driver, [times]
    usual = getattr(driver, inside)

    def first_a_signal(*args: Any) -> Any:
        while left[0]:
            left[0] -= 1
            os.kill(os.getpid(), number)
        return usual(*args)

    setattr(driver, inside, first_a_signal)
    try:
        with pytest.raises(error):
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


KINDS = (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.slow
def test_a_save_from_a_handler_breaks_nothing(tmp_path: Path) -> None:
    job, batch = job_of(1)
    wanted = [float(job.step(batch)) for _ in range(3)]
    job.close()
    job, batch = job_of(1)

    def handler(number: int, frame: object) -> None:
        job.save(tmp_path / "saved")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with job:
            losses = [float(job.step(batch))]
            raise_interrupt(job, lambda: job.step(batch), number=signal.SIGUSR1, error=PlanError)
            assert job.last is not None and not (tmp_path / "saved").exists()
            losses += [job.last.loss, float(job.step(batch))]
            os.kill(os.getpid(), signal.SIGUSR1)  # between calls it saves
            assert losses == wanted and (tmp_path / "saved").exists()
    finally:
        signal.signal(signal.SIGUSR1, before)


def is_in_product(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != one_call.__file__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("num_devices", [1, 2])
def test_two_hundred_signals_of_each_kind_break_nothing(num_devices: int, tmp_path: Path) -> None:
    """At random times of steps, saves and evaluations; what was trained is as without."""
    raised, left = Counter[int](), {number: 200 for number in KINDS}

    def handler(number: int, frame: FrameType | None) -> None:
        if is_in_product(frame):
            raised[number] += 1
            raise TimeoutError(f"signal {number}")

    def send() -> None:
        draws = random.Random(0)
        while numbers := [number for number, count in left.items() if count]:
            number = draws.choice(numbers)
            left[number] -= 1
            os.kill(os.getpid(), number)
            time.sleep(draws.random() * 0.01)

    def repeat(call: Callable[[], Any]) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                return call()

    job, batch = job_of(num_devices)
    losses, before = list[float](), {number: signal.signal(number, handler) for number in KINDS}
    try:
        with job:
            job.step(batch)
            sender = threading.Thread(target=send)
            sender.start()
            while sender.is_alive() or len(losses) < 5:
                with contextlib.suppress(TimeoutError):
                    job.step(batch)
                if job.step_count == len(losses) + 2:  # else the signal came before the step began
                    losses.append(repeat(lambda: job.last).loss)
                with contextlib.suppress(TimeoutError):
                    job.save(tmp_path / "saved", wait=len(losses) % 2 == 0)
                repeat(lambda: job.evaluate(batch))
            state = job.state_dict()
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
    assert all(raised[number] > 20 for number in KINDS), raised
    job, batch = job_of(num_devices)
    with job:
        job.step(batch)
        assert [float(job.step(batch)) for _ in losses] == losses
        assert all(torch.equal(tensor, state[name]) for name, tensor in job.state_dict().items())


@pytest.mark.slow
@pytest.mark.multi
def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    with agents(tmp_path, "interrupt", "1", "--slow", per_node=2) as running:
        assert running.wait(200) == [0], running.output()
        found = running.results()
    assert len({row["interrupted after"] for row in found.values()}) == 1
    assert found[0]["losses"] == found[1]["losses"] and len(found[0]["losses"]) == 5  # that step's is in `job.last`
