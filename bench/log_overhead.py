"""The cost of logging in a step of about 50 ms: steps that are told to logs against steps that are not, of one job.

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
from pathlib import Path
from typing import Any

from penstock.bench.peers import rows
from penstock.bench.peers.told_steps import ROWS, compare_in_turns, small_job, time_of
from penstock.compiler.job.job import Job
from penstock.training.broadcast import Broadcast, facts_of
from penstock.training.logs.find import find_logs

STEPS = 100  # of a block; the wait for the logs at its end, which a run has once, is spread over them
LOGS = (["jsonl"], ["tensorboard"], ["wandb"], ["jsonl", "tensorboard", "wandb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of blocks")
    parser.add_argument("--logs", nargs="+", help="these together only; by default each, and all together")
    args = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    job, batch = small_job()
    with job:
        time_of(job, batch, STEPS, None, [])
        for names in [args.logs] if args.logs else LOGS:
            with tempfile.TemporaryDirectory() as folder:
                rows.save("log_overhead", {"logs": names, **measure(job, batch, names, Path(folder), args.pairs)})


def measure(job: Job, batch: Any, names: list[str], folder: Path, pairs: int) -> dict[str, Any]:
    broadcast, telling_s = Broadcast(job, find_logs(names, folder)), list[float]()
    broadcast.begin(facts_of(job, "bench", str(folder), job.step_count + STEPS * pairs, ROWS))

    def plain() -> float:
        found_s = time_of(job, batch, STEPS, None, [])
        job.take_reports()
        return found_s

    found = compare_in_turns(pairs, plain, lambda: time_of(job, batch, STEPS, broadcast, telling_s))
    broadcast.end()
    return {**found, "script_waits_us": statistics.median(telling_s) * 1e6, "pairs": pairs, "steps_in_a_block": STEPS}


if __name__ == "__main__":
    main()
