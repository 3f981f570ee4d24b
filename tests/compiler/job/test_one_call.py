"""A second call while one is under way is refused at once; calls one after another may come from any thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.job.one_call import OneCall
from penstock.ir.errors import PlanError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case


@pytest.fixture
def running() -> Any:
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB")
    chosen = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced"}
    with penstock.compile(model, hardware, example_inputs=batch, **chosen) as job:
        job.step(batch)
        yield job, batch


def hold(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make the job's steps wait. Returns the events of their begin and of their leave to go on."""
    begun, leave = threading.Event(), threading.Event()
    real = job.driver.begin_step

    def step(batch: Any, **options: Any) -> Any:
        begun.set()
        assert leave.wait(20)
        return real(batch, **options)

    monkeypatch.setattr(job.driver, "begin_step", step)
    return begun, leave


def test_a_second_thread_is_refused_not_kept_waiting(
    running: tuple[Job, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, batch = running
    begun, leave = hold(job, monkeypatch)
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(job.step(batch)), name="first")
    thread.start()
    assert begun.wait(20)
    calls = {
        "step": lambda: job.step(batch),
        "evaluate": lambda: job.evaluate(batch),
        "save": lambda: job.save(tmp_path / "checkpoint"),
        "resume": lambda: job.resume(tmp_path / "checkpoint"),
        "state_dict": job.state_dict,
        "states": lambda: list(job.states()),
        "sync": job.sync,
        "save_pretrained": lambda: job.save_pretrained(tmp_path / "weights"),
        "timeline": job.timeline,
        "stragglers": job.stragglers,
        "close": job.close,
    }
    for name, call in calls.items():
        shown = "timeline" if name == "stragglers" else name
        with pytest.raises(PlanError, match=rf"job\.{shown} .* while job\.step in thread first is under way"):
            call()
    leave.set()
    thread.join()
    assert len(losses) == 1 and job.step_count == 2 and not list(tmp_path.iterdir())
    assert float(job.step(batch)) < float(losses[0])  # one after another, from another thread than before


def test_a_signal_handler_is_refused(running: tuple[Job, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that saves in the middle of a step would take the step's answers."""
    job, batch = running
    refused: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            job.state_dict()
        except PlanError as error:
            refused.append(str(error))

    real = job.driver.begin_step

    def step(batch: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return real(batch, **options)

    monkeypatch.setattr(job.driver, "begin_step", step)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        job.step(batch)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1 and "job.state_dict" in refused[0] and "job.step" in refused[0]
    assert job.step_count == 2 and job.state_dict()


def test_an_error_ends_a_call(running: tuple[Job, Any]) -> None:
    job, batch = running
    with pytest.raises(penstock.errors.BatchError):
        job.step({})
    for _ in job.states():
        break  # an iteration that is given up ends, too
    job.step(batch)


def test_a_forked_child_is_refused_and_changes_nothing(running: tuple[Job, Any], tmp_path: Path) -> None:
    job, batch = running
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: job.step(batch),
        "last": lambda: job.last,
        "driver": lambda: job.driver,
        "save": lambda: job.save(tmp_path / "checkpoint"),
        "states": lambda: list(job.states()),
        "close": job.close,
    }
    child = os.fork()
    if child == 0:
        refused = [name for name, call in calls.items() if _is_refused(call)]
        os._exit(len(calls) - len(refused))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert job.step(batch).isfinite() and job.step_count == 2


def test_a_job_that_has_not_begun_may_begin_in_a_forked_child() -> None:
    calls = OneCall()
    child = os.fork()
    if child == 0:
        calls.require_own_process("step")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    calls.require_own_process("step")
    assert os.waitstatus_to_exitcode(status) == 0


def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except PlanError as error:
        return "a fork of process" in str(error)
    return False


def test_states_leave_the_callers_state_of_torch_between_stages(running: tuple[Job, Any]) -> None:
    job, _ = running
    with torch.no_grad():
        assert [torch.is_grad_enabled() for _ in job.states()] == [False]
