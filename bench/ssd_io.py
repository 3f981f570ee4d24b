"""Scratch files on SSD against a plain loop of O_DIRECT pread and pwrite, engines and checksums, turn by turn.

One file is written and read in regions, as the runtime does; the plain loops move the same bytes in blocks of 4 MiB,
one after the other and four at a time. Every file has been written once before. `busy_bytes_per_s` is the rate beside
a thread that runs Python code without a pause, `busy_share` that thread's own speed (1: as if alone).

Run: python bench/ssd_io.py [--directory DIRECTORY] [--size 1GiB] [--region 64MiB] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from penstock.bench.peers import rows
from penstock.ir.units import parse_bytes
from penstock.runtime.ssd.folder import SsdFolder

BLOCK_BYTES = 4 << 20


class PlainLoop:
    """The simplest loop that moves a file past the page cache, `depth` blocks at a time."""

    def __init__(self, path: Path, size_bytes: int, depth: int):
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.descriptor, 0, size_bytes)
        self.pool = ThreadPoolExecutor(depth)

    def move(self, call: Callable[..., int], offset_bytes: int, memory: Tensor) -> None:
        view = memory.numpy().data
        starts = range(0, len(memory), BLOCK_BYTES)
        done = self.pool.map(lambda at: call(self.descriptor, [view[at : at + BLOCK_BYTES]], offset_bytes + at), starts)
        assert sum(done) == len(memory)

    def write(self, offset_bytes: int, memory: Tensor) -> None:
        self.move(os.pwritev, offset_bytes, memory)

    def read(self, offset_bytes: int, memory: Tensor) -> None:
        self.move(os.preadv, offset_bytes, memory)

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.descriptor)


class Spin:
    """A thread that counts, to measure how much of the interpreter's time others leave it."""

    def __init__(self) -> None:
        self.count, self.stop = 0, False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stop:
            self.count += 1

    def run_beside(self, run: Callable[[], object]) -> tuple[float, float]:
        """Call `run`; returns its seconds and the counts per second meanwhile."""
        start, before = time.perf_counter(), self.count
        run()
        seconds = time.perf_counter() - start
        return seconds, (self.count - before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the disk to measure; default: the current one"
    )
    parser.add_argument("--size", type=parse_bytes, default=1 << 30)
    parser.add_argument("--region", type=parse_bytes, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    memory = aligned_memory(args.region)
    memory.random_()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, movers(Path(folder), args.size) as all_movers:
        jobs = {
            (name, direction): partial(sweep, getattr(mover, direction), args.size, memory)
            for (name, mover), direction in product(all_movers.items(), ("write", "read"))
        }
        for (_, direction), job in jobs.items():  # blocks of the file that were never written are slower
            if direction == "write":
                job()
        times = measure(jobs, args.rounds)
        spin = Spin()
        _, alone = spin.run_beside(lambda: time.sleep(0.5))
        busy = {key: spin.run_beside(job) for key, job in jobs.items()}
        spin.stop = True
    for (name, direction), (wall_s, cpu_s) in times.items():
        plain = {peer: times[peer, direction][0] for peer in ("loop", "loop of 4")}
        rows.save(
            "ssd_io",
            {
                "case": name,
                "direction": direction,
                "bytes": args.size,
                "bytes_per_s": args.size / statistics.median(wall_s),
                "fastest_bytes_per_s": args.size / min(wall_s),
                "cpu_s": statistics.median(cpu_s),
                "busy_bytes_per_s": args.size / busy[name, direction][0],
                "busy_share": busy[name, direction][1] / alone,
                **{f"ratio_to_{peer.replace(' ', '_')}": ratio(peer_s, wall_s) for peer, peer_s in plain.items()},
                **rows.spread(wall_s),
            },
        )


@contextmanager
def movers(folder: Path, size_bytes: int) -> Iterator[dict[str, object]]:
    """The files to compare, by name: those of the plain loops, then each engine's without and with checksums."""
    loops = {name: PlainLoop(folder / name, size_bytes, depth) for name, depth in (("loop", 1), ("loop of 4", 4))}
    folders = {
        f"{engine}{', verify' * verify}": SsdFolder([folder], "bench", engine=engine, verify=verify)
        for engine, verify in product(("threads", "io_uring"), (False, True))
    }
    try:
        yield {**loops, **{name: made.reserve("file", size_bytes) for name, made in folders.items()}}
    finally:
        for each in (*loops.values(), *folders.values()):
            each.close()


def measure(
    jobs: dict[tuple[str, str], Callable[[], None]], rounds: int
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Wall and CPU seconds of each job, turn by turn. CPU seconds are of all threads, also the kernel's for this
    process."""
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = {key: ([], []) for key in jobs}
    for _ in range(rounds):
        for key, job in jobs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            job()
            times[key][0].append(time.perf_counter() - start)
            times[key][1].append(time.process_time() - start_cpu)
    return times


def sweep(call: Callable[[int, Tensor], None], size_bytes: int, memory: Tensor) -> None:
    for offset in range(0, size_bytes, len(memory)):
        call(offset, memory)


def ratio(peer_s: list[float], own_s: list[float]) -> float:
    """The ratio of our rate to the peer's, as the median over rounds."""
    return statistics.median(peer / own for peer, own in zip(peer_s, own_s, strict=True))


def aligned_memory(num_bytes: int) -> Tensor:
    whole = torch.empty(num_bytes + 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    return whole[start : start + num_bytes]


if __name__ == "__main__":
    main()
