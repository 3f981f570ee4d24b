"""TableTiming what CPU devices do: matrix products, copies, torch calls, AdamW, messages, and the host's disks.

Run as `python -m penstock.runtime.measure.cpu RANK WORLD THREADS CORES RENDEZVOUS [DIRECTORY ...]`: one process per
device, all at once, since devices that share a memory bus slow each other down; then rank 0 alone with all cores. Each
prints its rates as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..device.host import keep_freed_memory
from ..device.streams import SWITCH_S
from ..optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from .disks import rates_of_disks
from .links import fetch_latency_s, message_rates
from .table import DTYPES, TableTiming, measured_table
from .waiting import waited_s

FIGURE_S = 0.4  # time for one figure
SIZE_S = 0.03  # time for one size of the table of rates
SIZE_RUNS = 4  # at least
LEAST_S = 1e-7  # no clock here tells a shorter time from none
MIB = 2**20
MESSAGE_BYTES = (64 * 2**10, MIB // 2, 8 * MIB)


def steady_s(work: Callable[[], object], slice_s: float = FIGURE_S, least_runs: int = 3) -> float:
    """Seconds of `work`: the first quartile of its runs in `slice_s`, at least `least_runs`, after one warm-up.

    Not the median, since other work of the machine can only make runs longer; time in which the thread waited for a
    core does not count at all. The account of it is coarse: a run that seems to have waited for most of its time says
    nothing, unless all do.
    """
    work()
    times: list[tuple[bool, float]] = []
    end = time.perf_counter() + slice_s
    while len(times) < least_runs or time.perf_counter() < end:
        waited_before_s, start = waited_s(), time.perf_counter()
        work()
        took_s = time.perf_counter() - start
        own_s = took_s - (waited_s() - waited_before_s)
        is_disturbed = own_s < took_s / 2
        times.append((is_disturbed, max(took_s / 2 if is_disturbed else own_s, LEAST_S)))
    quiet = sorted(own_s for is_disturbed, own_s in times if not is_disturbed) or sorted(s for _, s in times)
    return quiet[len(quiet) // 4]


def copy_bandwidth(num_bytes: int = 64 * MIB) -> float:
    """Bytes copied per second between two tensors too large for the caches; each is one byte read and one written."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    return num_bytes / steady_s(lambda: target.copy_(source))


def call_overhead_s(layers: int = 20, device: str = "cpu") -> float:
    """Seconds that a torch call takes on data too small to count, with its share of Python's and autograd's work.

    Calls are counted as in costs: those of a forward once there and twice in its backward. A GPU's calls are launches,
    which take the host longer than they take the GPU.
    """
    with torch.device(device):
        norm, linear, start = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.ones(1, 2, 8)

    def block() -> None:
        value = start
        for _ in range(layers):
            value = value + linear(norm(value)).view(1, 2, 2, 4).transpose(1, 2).reshape(1, 2, 8)
        value.sum().backward()
        if start.is_cuda:
            torch.cuda.synchronize(start.device)

    calls = 4 * layers  # norm, linear, the copy in reshape, addition
    return steady_s(block, slice_s=0.2) / (3 * calls)


def adamw_params_per_s(num_params: int = 4 * MIB, dtype: torch.dtype = torch.float32) -> float:
    """Parameters per second of a stage's AdamW on fp32 states, as a device steps it. `dtype`: that of gradients, and of
    weights beside fp32 masters."""
    masters, grad = {"weight": torch.randn(num_params)}, torch.randn(num_params).to(dtype)
    weights = None if dtype == torch.float32 else {"weight": torch.empty(num_params, dtype=dtype)}
    part = StageOptimizer(OptimizerSpec("torch.optim:AdamW", {"lr": 1e-4}), masters)
    return num_params / steady_s(lambda: part.step({"weight": grad}, weights=weights))


def fastest_adamw(num_params: int, dtype: torch.dtype) -> tuple[int, float]:
    """The number of threads, up to this thread's, with which AdamW is the fastest, and its parameters per second: DRAM
    is full before all cores are at work."""
    own, rates = torch.get_num_threads(), dict[int, float]()
    try:
        for threads in sorted({own, *(1 << power for power in range(own.bit_length()))}):
            torch.set_num_threads(threads)
            rates[threads] = adamw_params_per_s(num_params, dtype)
    finally:
        torch.set_num_threads(own)
    best = max(rates, key=rates.__getitem__)
    return best, rates[best]


def rate_table(overhead_s: float) -> dict[str, Any]:
    """The table of rates of this process's threads."""
    timing = TableTiming(
        torch.device("cpu"), lambda work: steady_s(work, SIZE_S, SIZE_RUNS), overhead_s, sizes=(128, 256, 512, 1024),
        lengths=(128, 512), head_sizes=(64, 128), heads=2, tokens=512, tensor_bytes=(MIB // 16, MIB, 16 * MIB),
    )  # fmt: skip
    return measured_table(timing, tuple(DTYPES), ("flash",))


def device_rates() -> Iterator[tuple[str, Any]]:
    """The rates of a device of this process's threads, figure by figure."""
    overhead_s = call_overhead_s()
    yield "op_overhead_s", overhead_s
    yield "rates", rate_table(overhead_s)
    yield "copy", copy_bandwidth()
    yield "copy_latency_s", fetch_latency_s()


def measure_cpu(disk_directories: Sequence[str], store: dist.Store, cores: int) -> dict[str, Any]:
    """All rates of this process's device, in step with the other ranks; on rank 0 also those of the disks, and of a
    device with all `cores`, where this one has fewer. `store`: where ranks 0 and 1 meet to exchange messages."""
    rates: dict[str, Any] = {}
    dist.barrier()
    for name, found in device_rates():
        rates[name] = found
        dist.barrier()
    rates["adamw"] = adamw_params_per_s()
    dist.barrier()
    if dist.get_world_size() > 1 and dist.get_rank() < 2:
        rates |= message_rates(store, dist.get_rank(), MESSAGE_BYTES)
    dist.barrier()
    if dist.get_rank() == 0:
        rates |= rates_of_disks(disk_directories)
        if cores != torch.get_num_threads():
            torch.set_num_threads(cores)
            rates["all_cores"] = dict(device_rates())
    dist.barrier()
    return rates


def main(arguments: list[str]) -> None:
    rank, world, threads, cores, rendezvous, *directories = arguments
    keep_freed_memory()  # as the devices themselves do
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(int(threads))
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60)
    )
    try:
        store = dist.FileStore(f"{rendezvous}-messages", 2)
        print(json.dumps(measure_cpu(directories, store, int(cores))))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
