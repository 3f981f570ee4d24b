"""TableTiming what CUDA devices do: matrix products, their memory, pinned copies alone and together, peers.

Run as `python -m penstock.runtime.measure.cuda GROUPS [DIRECTORY ...]` where GROUPS is a JSON list with the device
indices under each root complex. Prints one line of JSON. A process of its own, so that the caller keeps no context.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir.machine.presets import cublas_bytes
from .cpu import MIB, adamw_params_per_s, call_overhead_s, copy_bandwidth, fastest_adamw
from .disks import rates_of_disks
from .links import link_shares
from .table import BACKENDS, DTYPES, TableTiming, measured_table

KERNELS_S = 0.3
WARM_RUNS = 3
SIZE_S = 0.05  # time for one size of the table of rates
COPY_BYTES = 256 * MIB
PEER_BYTES = (64 * 2**10, MIB, 16 * MIB)  # copies from GPU to GPU, besides those of COPY_BYTES
ADAMW_PARAMS = 64 * MIB
ADAMW_S = 0.4  # of one step, at most
TABLE_SIZES: dict[str, Any] = {
    "sizes": (512, 1024, 2048, 4096, 8192), "lengths": (512, 2048, 8192), "head_sizes": (64, 128), "heads": 16,
    "tokens": 16384, "tensor_bytes": (4 * MIB, 64 * MIB),
}  # fmt: skip


def mean_s(work: Callable[[], object], device: int, slice_s: float = KERNELS_S) -> float:
    """Mean seconds of `work` on a device's current stream, by events, over about `slice_s`; work that takes longer runs
    twice, and the second run counts."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        work()  # loads its kernels
        for _ in range(WARM_RUNS):
            stream.synchronize()
            begin = time.perf_counter()
            work()
            stream.synchronize()
            took_s = time.perf_counter() - begin
            if took_s > slice_s:
                return took_s
        repeats = max(1, int(slice_s / max(took_s, 1e-6)))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats


def alone_s(work: Callable[[], object], device: int, repeats: int = 50) -> float:
    """Seconds of `work` on an idle stream, from the event before it to the one after it, as the runtime's streams
    record them: the time of a transfer with nothing in it. The first quartile."""
    with torch.cuda.device(device):
        stream, times = torch.cuda.current_stream(), list[float]()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        for _ in range(repeats):
            stream.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        return sorted(times)[repeats // 4]


def rate_table(device: int, overhead_s: float) -> dict[str, Any]:
    """The table of rates of one GPU."""
    here = torch.device("cuda", device)
    timing = TableTiming(here, lambda work: mean_s(work, device, SIZE_S), overhead_s, **TABLE_SIZES)
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return measured_table(timing, [name for name in DTYPES if has_bf16 or name != "bf16"], tuple(BACKENDS))


def measured_reserves(num_devices: int) -> list[dict[str, int]]:
    """Per GPU the bytes of a context together with what other programs hold, and of the libraries' workspaces. To be
    called before anything is allocated."""
    devices = range(num_devices)
    held_bytes = [total - free for free, total in map(torch.cuda.mem_get_info, devices)]
    library_bytes = [_library_bytes(device) for device in devices]
    parts = zip(held_bytes, library_bytes, strict=True)
    return [{"context_bytes": a, "libraries_bytes": b} for a, b in parts]


def _library_bytes(device: int) -> int:
    """The bytes of workspaces: what products leave allocated for this thread and for autograd's, and no less than one
    product holds, as torch gives it back from 2.15 on."""
    before_bytes = torch.cuda.memory_allocated(device)
    rows = torch.ones(64, 64, device=f"cuda:{device}", requires_grad=True)
    (rows @ rows).sum().backward()
    rows.grad = None
    torch.cuda.synchronize(device)
    left_bytes = torch.cuda.memory_allocated(device) - before_bytes - rows.nbytes
    return max(left_bytes, cublas_bytes(torch.cuda.get_device_capability(device)))


def measured_tables(num_devices: int) -> list[dict[str, Any]]:
    """Per GPU the overhead of a call and the table of rates, measured once for all GPUs of one name: eight tables would
    take a minute."""
    found: dict[str, dict[str, Any]] = {}
    names = [torch.cuda.get_device_name(device) for device in range(num_devices)]
    for device, name in enumerate(names):
        if name not in found:
            overhead_s = call_overhead_s(device=f"cuda:{device}")
            found[name] = {"op_overhead_s": overhead_s, "rates": rate_table(device, overhead_s)}
    return [found[name] for name in names]


def measure_device(device: int) -> dict[str, Any]:
    """Rates of one GPU that has its links to itself."""
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    twin, pinned = torch.empty_like(here), torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    few, few_pinned = here[:64], pinned[:64]
    return {
        "memory": 2 * COPY_BYTES / mean_s(lambda: twin.copy_(here), device),
        "h2d": COPY_BYTES / mean_s(lambda: here.copy_(pinned, non_blocking=True), device),
        "d2h": COPY_BYTES / mean_s(lambda: pinned.copy_(here, non_blocking=True), device),
        "copy_latency_s": alone_s(lambda: few.copy_(few_pinned, non_blocking=True), device),
    }


class Copies:
    """Pinned copies of several GPUs at once, in the directions asked for, each on a stream of its own."""

    def __init__(self, devices: Sequence[int], down: bool, up: bool):
        self.devices = devices
        self.lanes: list[tuple[torch.cuda.Stream, Tensor, Tensor]] = []  # stream, target, source
        for device in devices:
            for to_device in [True] * down + [False] * up:
                here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
                pinned = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
                target, source = (here, pinned) if to_device else (pinned, here)
                self.lanes.append((torch.cuda.Stream(device=device), target, source))
        for device in devices:
            torch.cuda.synchronize(device)

    def run(self, repeats: int = 1) -> None:
        """Issue every copy `repeats` times, and wait for all."""
        for _ in range(repeats):
            for stream, target, source in self.lanes:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream, *_ in self.lanes:
            stream.synchronize()

    def bandwidth(self, repeats: int = 4) -> float:
        """Bytes/s of all copies together."""
        self.run()
        start = time.perf_counter()
        self.run(repeats)
        return repeats * len(self.lanes) * COPY_BYTES / (time.perf_counter() - start)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps the links busy from a thread of its own."""
        done = threading.Event()

        def keep() -> None:
            while not done.is_set():
                self.run(2)

        with ThreadPoolExecutor(1) as pool:
            thread = pool.submit(keep)
            try:
                yield
            finally:
                done.set()
            thread.result()


def link_rates(groups: list[list[int]]) -> dict[str, list[float]]:
    """For each root complex, the bytes/s that all its GPUs copy at once: down, up, and in both directions together."""
    ways = {"down": (True, False), "up": (False, True), "both": (True, True)}
    return {name: [Copies(group, *way).bandwidth() for group in groups] for name, way in ways.items()}


def busy_adamw(groups: list[list[int]]) -> tuple[int, float]:
    """The best number of threads for the host's AdamW, and its parameters per second, while all GPUs copy in both
    directions, as they do in a step: copies and the optimizer share DRAM. It steps more parameters than caches hold,
    fewer on a slow host."""
    with Copies([device for group in groups for device in group], down=True, up=True).busy():
        fitting = int(ADAMW_S * adamw_params_per_s(dtype=torch.bfloat16))
        return fastest_adamw(min(ADAMW_PARAMS, fitting), torch.bfloat16)


def peer_rates(src: int, dst: int) -> dict[str, Any]:
    """Bandwidth and latency of copies from one GPU to another that can reach it, and the share of the bandwidth that
    copies of several sizes reach."""
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{src}")
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{dst}")
    latency_s = alone_s(lambda: there[:64].copy_(here[:64], non_blocking=True), src)
    took_s = {
        size: alone_s(partial(there[:size].copy_, here[:size], non_blocking=True), src) for size in PEER_BYTES
    } | {COPY_BYTES: latency_s + mean_s(lambda: there.copy_(here, non_blocking=True), src)}
    return {"link_latency_s": latency_s, **link_shares(latency_s, took_s)}


def measure_machine(groups: list[list[int]], disk_directories: Sequence[str]) -> dict[str, Any]:
    """Rates of every GPU, of each root complex's group together, of a pair of peers, of the host and its disks."""
    num_devices = sum(map(len, groups))
    threads, params_per_s = busy_adamw(groups)
    report: dict[str, Any] = {
        "reserves": measured_reserves(num_devices),
        "devices": [{**measure_device(device), **table} for device, table in enumerate(measured_tables(num_devices))],
        **link_rates(groups),
        "host": {"adamw": params_per_s, "adamw_threads": threads, "copy": copy_bandwidth(256 * MIB)},
    }
    if num_devices > 1 and torch.cuda.can_device_access_peer(0, 1):
        report["peer"] = peer_rates(0, 1)
    return report | rates_of_disks(disk_directories)


def main(arguments: list[str]) -> None:
    groups, *directories = arguments
    print(json.dumps(measure_machine(json.loads(groups), directories)))


if __name__ == "__main__":
    main(sys.argv[1:])
