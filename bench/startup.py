"""Seconds until training runs on two devices: compile, start the workers, first step; torch's pipeline beside it.

Each start is the first of its script; `next_start_s` is the start of the script's next job. Also how long a worker's
imports take, and how much of that is torch's own.

Run: python bench/startup.py [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import whole_step
from penstock.bench.peers.torch_pipeline import LR, TorchPipeline

SPLIT, MICRO_BATCHES = "transformer.h.5", 4
READY = ("compile_s", "start_s", "first_step_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs, imports = [], [], []
    for _ in range(args.rounds):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as script:
            ours.append(script.submit(start_penstock).result())
        theirs.append(start_torch())
        imports.append({name: imported_s(name) for name in ("torch", "penstock.runtime.processes.worker")})
    middle = {"penstock": medians(ours), "torch gpipe": medians(theirs), "imports": medians(imports)}
    ready = {name: sum(s for what, s in middle[name].items() if what in READY) for name in list(middle)[:2]}
    rows.save(
        "startup",
        {
            "model": "gpt2 8 x 256 untied, vocabulary 8192, sequence 128, batch 8", "devices": 2, **middle,
            "until_first_step_s": ready, "ratio": ready["penstock"] / ready["torch gpipe"],
        },
    )  # fmt: skip


def start_penstock() -> dict[str, float]:
    torch.set_num_threads(1)
    batch, model = models.batch(), models.gpt2(tied=False)
    machine = penstock.Hardware.cpu(num_devices=2, memory="2GB", dram="4GB")
    make = partial(
        penstock.compile, model, machine, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=LR),
        strategy="gpipe", micro_batches=MICRO_BATCHES,
    )  # fmt: skip
    found = {}
    found["compile_s"], job = time_of(make)
    with job:
        found["start_s"], _ = time_of(lambda: job.driver)
        found["first_step_s"], _ = time_of(lambda: whole_step(job, batch))
        found["second_step_s"], _ = time_of(lambda: whole_step(job, batch))
    with make() as job:
        found["next_start_s"], _ = time_of(lambda: job.driver)
    return found


def start_torch() -> dict[str, float]:
    start_s, peer = time_of(lambda: TorchPipeline("gpipe", [SPLIT], MICRO_BATCHES))
    with peer:
        return {
            "start_s": start_s,  # imports, model and tracing included
            "first_step_s": time_of(peer.step)[0],
            "second_step_s": time_of(peer.step)[0],
        }


def imported_s(module: str) -> float:
    """Seconds of a process that only imports a module."""
    return time_of(lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True))[0]


def time_of(work: Callable[[], object]) -> tuple[float, object]:
    begin_s = time.perf_counter()
    result = work()
    return time.perf_counter() - begin_s, result


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
