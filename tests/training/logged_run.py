"""A tiny run of a real job, told to listeners."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, zoo_case
from penstock.training.broadcast import Broadcast, facts_of
from penstock.training.listener import Listener, RunFacts, StepRecord

STEPS, TOKENS = 4, 64
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Noted(Listener):
    """Keeps all it is told."""

    def __init__(self) -> None:
        self.runs: list[RunFacts] = []
        self.records: list[StepRecord] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.ends: list[bool] = []

    def begin(self, run: RunFacts) -> None:
        self.runs.append(run)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluated(self, step: int, metrics: Any) -> None:
        self.evaluations.append((step, dict(metrics)))

    def end(self, interrupted: bool = False) -> None:
        self.ends.append(interrupted)


def compile_job(memory: str = "250kB", **options: Any) -> tuple[Job, dict[str, torch.Tensor]]:
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=1, memory=memory, dram="1GB")
    chosen = {"optimizer": ADAMW, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options}
    return penstock.compile(model, hardware, example_inputs=batch, **chosen), batch


def run(listeners: Sequence[Listener], steps: int = STEPS, **options: Any) -> Noted:
    """Train, with an evaluation before the last step. Returns what a listener beside the others was told."""
    job, batch = compile_job(max_grad_norm=1.0, **options)
    noted = Noted()
    with job:
        broadcast = Broadcast(job, [*listeners, noted])
        broadcast.begin(facts_of(job, "tiny", "out", steps, MICRO_BATCHES, {"lr": 1e-3}))
        for step in range(1, steps + 1):
            if step == steps:
                broadcast.evaluated({"loss": float(job.evaluate(batch, outputs=False).loss)})
            job.step(batch)
            broadcast.stepped(TOKENS)
        _ = job.last
        broadcast.end()
        broadcast.end()
    return noted
