"""A script for torchrun: ranks make steps one right after another, compare them with eager, or meet a fault between.

torchrun --nproc-per-node=2 -m penstock.tests.compiler.job.steps_of_ranks FOLDER [exact STRATEGY | raise | die | leave]

Each rank writes FOLDER/rankR.json. An update of a step after the first waits until `release` is called for that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import WorkerError
from penstock.ir.program import drain_of
from penstock.runtime.stage.store import StageStore
from penstock.tests.compiler.eager_baseline import (
    MICRO_BATCHES,
    SGD,
    Eager,
    assert_close,
    assert_same_states,
    zoo_case,
)

STEPS = 5
REORDERED = 5e-6  # see test_job_parity.py: gpt2 ties its table
RANK = int(os.environ.get("RANK", "0"))


class HeldUpdates:
    """Lets the updates of a step begin only once it has returned here. `fails_in`: the step whose update raises."""

    def __init__(self, fails_in: int = 0):
        self.allowed, self.fails_in, self.changed = 1, fails_in, threading.Condition()
        self.steps: dict[str, int] = {}
        self.update = StageStore.update
        StageStore.update = lambda store, *args, **fields: self(store, *args, **fields)  # type: ignore[method-assign]

    def __call__(self, store: StageStore, *args: Any, **fields: Any) -> None:
        self.steps[store.spec.name] = step = self.steps.get(store.spec.name, 0) + 1
        with self.changed:
            assert self.changed.wait_for(lambda: self.allowed >= step, 60), "a step waits for its updates"
        if step == self.fails_in:
            raise ArithmeticError("no such update")
        self.update(store, *args, **fields)

    def release(self, step: int) -> None:
        with self.changed:
            self.allowed = step
            self.changed.notify_all()


def compile_job(strategy: str = "gpipe", **options: Any) -> tuple[Job, Any, dict[str, torch.Tensor]]:
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=2, memory="500kB", dram="1GB")
    chosen = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": strategy, "timeout_s": 60.0, **options}
    return penstock.compile(model, hardware, example_inputs=batch, **chosen), model, batch


def exact(strategy: str) -> dict[str, Any]:
    """Losses, the gradients of all steps (through momentum) and weights are eager's. Reports are read by all ranks, by
    one alone, and not at all."""
    clipped = strategy.startswith("clipped ")
    norm = 0.05 if clipped else None
    job, model, batch = compile_job(strategy.removeprefix("clipped "), max_grad_norm=norm)
    assert drain_of(job.programs, "fp32") is None
    assert "begins before the one before has ended" in job.explain(full=True)
    held, eager, read = HeldUpdates(), Eager(model, max_grad_norm=norm), []
    with job:
        for step in range(1, STEPS + 1):
            given = {name: tensor.clone() for name, tensor in batch.items()}
            loss = job.step(given)
            for tensor in given.values():
                tensor.zero_()  # a script may reuse its batch
            held.release(step)
            assert_close({"loss": loss}, {"loss": eager.step(batch)}, 1e-6)
            if step == 2 or (step == 3 and RANK == 1):
                assert job.last is not None and job.last.loss == float(loss)
                read.append(job.last.step)
                assert not clipped or abs(job.last.gradient_norm - eager.gradient_norm) < 1e-4 * eager.gradient_norm
        assert_same_states(job, eager, REORDERED)
        assert_close(job.state_dict(), eager.model.state_dict(), REORDERED)
        assert job.last is not None and sorted(job.last.busy_share) == ["cpu0", "cpu1"]
        reports = [(report.step, report.loss, report.learning_rates) for report in job.take_reports()]
        return {"read": read, "reports": reports, "moved": job.last.moved_bytes, "peaks": job.last.peak_bytes}


def fail(fault: str) -> dict[str, Any]:
    """Rank 1 fails between two steps, while its script does something else; rank 0 reads the step's report."""
    job, _, batch = compile_job()
    held = HeldUpdates(fails_in=3 if fault == "raise" and RANK == 1 else 0)
    for step in range(1, 4):
        job.step(batch)
        if step < 3 or (fault, RANK) != ("leave", 0):
            held.release(step)
    began_s = time.monotonic()
    if RANK == 1 and fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1 and fault == "leave":
        return {}  # neither closes the job nor reads
    if RANK == 1:
        Path(sys.argv[1], "in its script").touch()
        while not Path(sys.argv[1], "rank0.json").exists():
            time.sleep(0.01)
    if fault == "leave":
        time.sleep(1.0)  # the other script is over long since
        held.release(3)
        assert job.last is not None
        return {"step": job.last.step, "devices": sorted(job.last.busy_share)}
    try:
        return {"step": job.last and job.last.step}
    except WorkerError as error:
        return {"error": str(error), "seconds": time.monotonic() - began_s}


def main() -> None:
    fault = sys.argv[2]
    found = exact(sys.argv[3]) if fault == "exact" else fail(fault)
    path = Path(sys.argv[1], f"rank{RANK}.json")
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main()
