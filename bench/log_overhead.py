"""What logging costs a step of about 50 ms: steps that are told to logs against steps that are not, of one job.

Blocks of both kinds take turns in one process, the first of each pair in turns, too. A block of logged steps ends when
the logs have written all of it, so that none of their work falls into the other's time. The device is a CPU device in
the script's own process: its streams share the interpreter with the threads that write, which no worker's do.

Run: python bench/log_overhead.py [--pairs N] [--logs jsonl tensorboard wandb]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.compiler.job.job import Job
from penstock.training.broadcast import Broadcast, facts_of
from penstock.training.logs.find import find_logs

STEPS = 20  # of a block
LOGS = (["jsonl"], ["tensorboard"], ["wandb"], ["jsonl", "tensorboard", "wandb"])
ROWS, SEQUENCE, VOCABULARY = 2, 64, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of blocks")
    parser.add_argument("--logs", nargs="+", help="these together only; by default each, and all together")
    args = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    batch = {name: value[:ROWS, :SEQUENCE].contiguous() for name, value in models.batch(vocabulary=VOCABULARY).items()}
    job = penstock.compile(
        models.gpt2(layers=4, tied=False, vocabulary=VOCABULARY),
        penstock.Hardware.cpu(num_devices=1, memory="4GB", dram="8GB"), example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-4), strategy="gpipe", micro_batches=1, max_grad_norm=1.0,
    )  # fmt: skip
    with job:
        for _ in range(STEPS):
            job.step(batch)
        for names in [args.logs] if args.logs else LOGS:
            with tempfile.TemporaryDirectory() as folder:
                rows.save("log_overhead", {"logs": names, **measure(job, batch, names, Path(folder), args.pairs)})


def measure(job: Job, batch: Any, names: list[str], folder: Path, pairs: int) -> dict[str, Any]:
    logs = find_logs(names, folder)
    broadcast = Broadcast(job, logs)
    broadcast.begin(facts_of(job, "bench", str(folder), job.step_count + STEPS * pairs, ROWS))
    plain, logged, telling_s = list[float](), list[float](), list[float]()

    def without() -> None:
        start_s = time.perf_counter()
        for _ in range(STEPS):
            job.step(batch)
        _ = job.last
        plain.append((time.perf_counter() - start_s) / STEPS)
        job.take_reports()

    def with_logs() -> None:
        start_s = time.perf_counter()
        for _ in range(STEPS):
            job.step(batch)
            begun_s = time.perf_counter()
            broadcast.stepped(ROWS * SEQUENCE)
            telling_s.append(time.perf_counter() - begun_s)
        _ = job.last
        broadcast.tell_ended()
        for log in logs:
            log.flush()
        logged.append((time.perf_counter() - start_s) / STEPS)

    for pair in range(pairs):
        for block in (without, with_logs) if pair % 2 else (with_logs, without):
            block()
    broadcast.end()
    return {
        "step_without_s": statistics.median(plain),
        "step_with_s": statistics.median(logged),
        "ratio_of_fastest": min(logged) / min(plain),
        "ratio_of_pairs": statistics.median(with_s / without_s for with_s, without_s in zip(logged, plain)),
        "script_waits_us": statistics.median(telling_s) * 1e6,
        "pairs": pairs,
        "steps_in_a_block": STEPS,
    }


if __name__ == "__main__":
    main()
