"""A made-up run, told to a listener: two GPUs, of which the second waits for the first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.training.listener import Listener, OfferRecord, RunFacts, StepRecord

GIB = 2**30
STEP_S = 0.05
OFFER = OfferRecord(
    step=75, times={"gpu1": 2.5}, before_s=0.2, after_s=0.12, plan="c0ffee", text="gpu1 takes 2.5x as long as planned",
    how="the same command with --resume --offered",
)  # fmt: skip


class Clock:
    """Counts as it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def facts_of_run(num_devices: int = 2, total_steps: int = 200, done_steps: int = 0) -> RunFacts:
    limits = {f"gpu{i}": 22 * GIB for i in range(num_devices)} | {"dram0": 200 * GIB}
    config = {"plan": "58afcb", "hardware": "rtx4090x2", "data": "/home/somebody/secret.txt"}
    return RunFacts("chat", "out/chat", total_steps, done_steps, predicted_s=0.048, limit_bytes=limits, config=config)


def record(step: int, num_devices: int = 2, loss: float | None = None) -> StepRecord:
    alike = {"h2d": 0.3, "d2h": 0.2, "send 0": 0.05, "recv 1": 0.02, "host": 0.0}
    streams = [{"compute": 0.8 - 0.1 * i, "recv 0": 0.1 + i / 2, **alike} for i in range(num_devices)]
    return StepRecord(
        step=step,
        loss=2 + 4 * math.exp(-step / 30) + 0.2 * math.sin(step) if loss is None else loss,
        seconds=STEP_S,
        tokens=4096,
        learning_rates=(5e-5,),
        gradient_norm=1.25,
        predicted_s=0.048,
        model_flops_utilisation=0.31,
        busy_share={f"gpu{i}": shares for i, shares in enumerate(streams)},
        peak_bytes={f"gpu{i}": (18 - i % 8) * GIB for i in range(num_devices)} | {"dram0": 120 * GIB, "ssd0": 0},
    )


def tell(listener: Listener, clock: Clock, steps: Iterable[int], num_devices: int = 2) -> None:
    """A step each 60 ms: 10 more than the devices need."""
    for step in steps:
        clock.now_s += 0.06
        listener.step(record(step, num_devices))
