"""What the live view costs a step of about 50 ms: steps that are shown against steps that are not, of one job.

Blocks of both kinds take turns in one process, the first of each pair in turns, too. The terminal is of 100 by 30
letters; the page is read by another process, as a browser would. The device is a CPU device in the script's own
process: its streams share the interpreter with the threads that draw, which no worker's do. Beginning and end of a view
are not timed; its thread draws as long as the block lasts.

Run: python bench/live_view.py [--pairs N] [--views terminal page]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console

import penstock
from penstock.bench.peers import models, rows
from penstock.compiler.job.job import Job
from penstock.training.broadcast import Broadcast, facts_of
from penstock.training.listener import Listener
from penstock.training.live.server import PageServer
from penstock.training.live.terminal import REFRESHES_PER_S, TerminalView

STEPS = 40  # of a block
VIEWS = (["terminal"], ["page"], ["terminal", "page"])
ROWS, SEQUENCE, VOCABULARY = 2, 64, 4096
READER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): print(len(line), flush=True)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of blocks")
    parser.add_argument("--views", nargs="+", help="these together only; by default each, and both together")
    args = parser.parse_args()
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
        for names in [args.views] if args.views else VIEWS:
            rows.save("live_view", {"views": names, **measure(job, batch, names, args.pairs)})


def measure(job: Job, batch: Any, names: list[str], pairs: int) -> dict[str, Any]:
    plain, shown, telling_s = list[float](), list[float](), list[float]()
    for pair in range(pairs):
        for with_view in (False, True) if pair % 2 else (True, False):
            if with_view:
                shown.append(with_views(job, batch, names, telling_s))
            else:
                job.take_reports()
                plain.append(timed(job, batch, None, []))
    return {
        "step_without_s": statistics.median(plain),
        "step_with_s": statistics.median(shown),
        "ratio_of_fastest": min(shown) / min(plain),
        "ratio_of_pairs": statistics.median(with_s / without_s for with_s, without_s in zip(shown, plain)),
        "script_waits_us": statistics.median(telling_s) * 1e6,
        "refreshes_per_s": REFRESHES_PER_S,
        "pairs": pairs,
        "steps_in_a_block": STEPS,
    }


def with_views(job: Job, batch: Any, names: list[str], telling_s: list[float]) -> float:
    """Seconds of a step in a block that is shown."""
    listeners: list[Listener] = []
    reader = None
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        if "terminal" in names:
            listeners.append(TerminalView(Console(file=nowhere, width=100, height=30, force_terminal=True)))
        if "page" in names:
            page = PageServer("127.0.0.1:0")
            listeners.append(page)
            command = [sys.executable, "-c", READER, f"{page.address}updates"]
            reader = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert reader.stdout is not None and reader.stdout.readline()
        job.take_reports()
        broadcast = Broadcast(job, listeners)
        broadcast.begin(facts_of(job, "bench", "", job.step_count + STEPS, ROWS))
        found_s = timed(job, batch, broadcast, telling_s)
        broadcast.end()
        if reader is not None:
            _, _ = reader.communicate(timeout=30)
    return found_s


def timed(job: Job, batch: Any, broadcast: Broadcast | None, telling_s: list[float]) -> float:
    start_s = time.perf_counter()
    for _ in range(STEPS):
        job.step(batch)
        if broadcast is not None:
            begun_s = time.perf_counter()
            broadcast.stepped(ROWS * SEQUENCE)
            telling_s.append(time.perf_counter() - begun_s)
    _ = job.last
    return (time.perf_counter() - start_s) / STEPS


if __name__ == "__main__":
    main()
