"""The cost of the live view in a step of about 50 ms: steps that are shown against steps that are not, of one job.

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
from typing import Any

from rich.console import Console

from penstock.bench.peers import rows
from penstock.bench.peers.told_steps import ROWS, compare_in_turns, small_job, time_of
from penstock.compiler.job.job import Job
from penstock.training.broadcast import Broadcast, facts_of
from penstock.training.listener import Listener
from penstock.training.live.server import PageServer
from penstock.training.live.terminal import REFRESHES_PER_S, TerminalView

STEPS = 40  # of a block
VIEWS = (["terminal"], ["page"], ["terminal", "page"])
READER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): print(len(line), flush=True)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of blocks")
    parser.add_argument("--views", nargs="+", help="these together only; by default each, and both together")
    args = parser.parse_args()
    job, batch = small_job()
    with job:
        time_of(job, batch, STEPS, None, [])
        for names in [args.views] if args.views else VIEWS:
            rows.save("live_view", {"views": names, **measure(job, batch, names, args.pairs)})


def measure(job: Job, batch: Any, names: list[str], pairs: int) -> dict[str, Any]:
    telling_s: list[float] = []

    def plain() -> float:
        job.take_reports()
        return time_of(job, batch, STEPS, None, [])

    found = compare_in_turns(pairs, plain, lambda: with_views(job, batch, names, telling_s))
    waits = {"script_waits_us": statistics.median(telling_s) * 1e6, "refreshes_per_s": REFRESHES_PER_S}
    return {**found, **waits, "pairs": pairs, "steps_in_a_block": STEPS}


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
        found_s = time_of(job, batch, STEPS, broadcast, telling_s)
        broadcast.end()
        if reader is not None:
            _, _ = reader.communicate(timeout=30)
    return found_s


if __name__ == "__main__":
    main()
