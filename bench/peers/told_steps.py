"""Steps of about 50 ms that somebody is told of, against steps of the same job that nobody is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import penstock

from ...compiler.job.job import Job
from ...training.broadcast import Broadcast
from . import models

ROWS, SEQUENCE, VOCABULARY = 2, 64, 4096


def small_job() -> tuple[Job, Any]:
    """A job on one CPU device, in this process, and its batch."""
    torch.set_num_threads(1)
    batch = {name: value[:ROWS, :SEQUENCE].contiguous() for name, value in models.batch(vocabulary=VOCABULARY).items()}
    job = penstock.compile(
        models.gpt2(layers=4, tied=False, vocabulary=VOCABULARY),
        penstock.Hardware.cpu(num_devices=1, memory="4GB", dram="8GB"), example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-4), strategy="gpipe", micro_batches=1, max_grad_norm=1.0,
    )  # fmt: skip
    return job, batch


def time_of(job: Job, batch: Any, steps: int, broadcast: Broadcast | None, telling_s: list[float]) -> float:
    """Seconds of each of some steps, until the broadcast's listeners have shown and written all. `telling_s` gets what
    the script waits for each."""
    start_s = time.perf_counter()
    for _ in range(steps):
        job.step(batch)
        if broadcast is not None:
            begun_s = time.perf_counter()
            broadcast.stepped(ROWS * SEQUENCE)
            telling_s.append(time.perf_counter() - begun_s)
    if broadcast is None:
        _ = job.last
    else:
        broadcast.flush()
    return (time.perf_counter() - start_s) / steps


def compare_in_turns(pairs: int, plain: Callable[[], float], told: Callable[[], float]) -> dict[str, float]:
    """Figures of blocks of both kinds, the first of each pair in turns, too; each gives the seconds of a step."""
    without: list[float] = []
    with_: list[float] = []
    for pair in range(pairs):
        for block, found in ((plain, without), (told, with_)) if pair % 2 else ((told, with_), (plain, without)):
            found.append(block())
    return {
        "step_without_s": statistics.median(without),
        "step_with_s": statistics.median(with_),
        "ratio_of_fastest": min(with_) / min(without),
        "ratio_of_pairs": statistics.median(a / b for a, b in zip(with_, without)),
    }
