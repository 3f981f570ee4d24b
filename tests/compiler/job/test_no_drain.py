"""Steps one after another: `step` returns with the loss, the end of a step goes on after it, and nothing changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.steps import drain_here
from penstock.ir.errors import WorkerError
from penstock.ir.program import Drain
from penstock.runtime.stage.store import StageStore
from penstock.tests.compiler.eager_baseline import (
    MICRO_BATCHES,
    SGD,
    Eager,
    assert_close,
    assert_same_states,
    zoo_case,
)
from penstock.tests.compiler.job.ssd_jobs import in_dram, job_of, on_ssd, train_steps
from penstock.tests.shown_elsewhere import slow_but

REORDERED = 5e-6  # see test_job_parity.py: gpt2 ties its table


def swapping_job(**options: Any) -> tuple[Job, nn.Module, dict[str, torch.Tensor]]:
    """Weights and updates in DRAM, on one device in this process."""
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="250kB", dram="1GB")
    chosen = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options}
    return penstock.compile(model, hardware, example_inputs=batch, **chosen), model, batch


def test_a_step_returns_before_its_updates_and_the_next_one_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates of each step after the first, which is measured to its end, wait until it has returned."""
    update, returned = StageStore.update, threading.Condition()
    steps, updates = [1], dict[str, int]()

    def hold(store: StageStore, *args: Any, **fields: Any) -> None:
        updates[store.spec.name] = number = updates.get(store.spec.name, 0) + 1
        with returned:
            assert returned.wait_for(lambda: steps[0] >= number, 60), "a step waits for its updates"
        update(store, *args, **fields)

    monkeypatch.setattr(StageStore, "update", hold)
    job, model, batch = swapping_job()
    eager = Eager(model)
    with job:
        for step in range(1, 5):
            given = {name: tensor.clone() for name, tensor in batch.items()}
            loss = job.step(given)
            for tensor in given.values():
                tensor.zero_()  # a script may reuse its batch
            with returned:
                steps[0] = step
                returned.notify_all()
            assert_close({"loss": loss}, {"loss": eager.step(batch)}, 1e-6)
        assert job.last is not None and job.last.step == 4 and job.last.moved_bytes["dram0 -> cpu0"] > 0
        assert_same_states(job, eager, REORDERED)
        assert_close(job.state_dict(), eager.model.state_dict(), REORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["step", "last", "evaluate", "save", "close"])
def test_what_breaks_the_end_of_a_step_is_raised_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, use: str
) -> None:
    job, _, batch = swapping_job()
    job.step(batch)

    returned = threading.Event()

    def fail(*args: Any, **fields: Any) -> None:
        assert returned.wait(60)
        raise ArithmeticError("no such update")

    monkeypatch.setattr(StageStore, "update", fail)
    job.step(batch)
    returned.set()
    calls = {
        "step": lambda: job.step(batch), "last": lambda: job.last, "evaluate": lambda: job.evaluate(batch),
        "save": lambda: job.save(tmp_path / "c"), "close": job.close,
    }  # fmt: skip
    with pytest.raises(WorkerError, match=r"the end of step 2: device 0 .* no such update"):
        calls[use]()
    assert job.step_count == 2
    job.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [on_ssd(), on_ssd("states")])
def test_files_on_ssd_are_read_after_they_are_written(tmp_path: Any, strategy: str) -> None:
    """Bit for bit as a job in DRAM whose every step ends before the next."""
    (tmp_path / "disk").mkdir()
    found = []
    for job, batch in (job_of("gpt2", in_dram()), job_of("gpt2", strategy, [tmp_path / "disk"])):
        with job:
            losses = [float(job.step(batch)) for _ in range(4)]
            found.append((losses, train_steps(job, batch, 1)))
    (plain, (told, left)), (losses, (told_here, left_here)) = found
    assert losses == plain and told[0][0] == told_here[0][0]
    assert all(torch.equal(left_here[name], tensor) for name, tensor in left.items())


@pytest.mark.parametrize("dropout", slow_but([0.5], [0.0, 0.5]))
def test_a_step_that_draws_in_the_scripts_process_is_over_when_it_returns(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script may draw as soon as it has the loss; a stage that is computed again would draw from its generator."""
    update, may_update, updates = StageStore.update, threading.Event(), [0]

    def count(store: StageStore, *args: Any, **fields: Any) -> None:
        assert may_update.wait(60)
        update(store, *args, **fields)
        updates[0] += 1

    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(dropout), nn.Linear(32, 8))
    batch = {"input": torch.ones(4, 8)}
    hardware = penstock.Hardware.cpu(num_devices=1, memory="6kB", dram="1GB")
    with penstock.compile(
        nn.Sequential(*model), hardware, example_inputs=batch, optimizer=SGD, micro_batches=2, strategy="balanced",
        loss_fn=lambda output, batch: output.square().mean(),
    ) as job:  # fmt: skip
        assert drain_here(job.programs, hardware, "fp32") is (Drain.DRAWS if dropout else None)
        timeline = job.simulate()
        assert (timeline.step_s == timeline.from_rest_s) == bool(dropout)
        job.step(batch)
        monkeypatch.setattr(StageStore, "update", count)
        if dropout:
            may_update.set()
        job.step(batch)
        assert (updates[0] > 0) == bool(dropout)
        may_update.set()
