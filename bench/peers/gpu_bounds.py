"""A machine with one GPU, and how long each part of a step takes on it alone: the computation, copies each way, the
optimizer on the CPU, the disk. No step can be shorter than the longest of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

import penstock
from penstock.bench.peers.bound import Disk
from penstock.bench.peers.gpt import Gpt, GptSize, batch_of
from penstock.bench.peers.gpu_cases import SMALL, Case
from penstock.bench.peers.gpu_setup import Row, Setup, note_call
from penstock.ir import ops
from penstock.runtime.measure.detect import ram_bytes
from penstock.runtime.measure.disks import disk_directories, disk_rates
from penstock.runtime.ssd.folder import free_space

FEW_LAYERS = 8


@dataclass
class Bench:
    """This machine with its device's memory limited. `directory` is for files; None if the scratch folder cannot hold
    them."""

    setup: Setup
    hardware: penstock.Hardware
    directory: str | None
    end_s: float
    known_s: dict[GptSize, float] = field(default_factory=dict)  # seconds of one micro-batch

    @property
    def left_s(self) -> float:
        return self.end_s - time.perf_counter()

    @cached_property
    def disk_s(self) -> Callable[[int, int], float]:
        """A function from bytes read and written to the seconds that the disk alone needs for them: one after the other
        or both at once, whichever is faster. It measures a sample of the same files."""
        assert self.directory is not None
        sample_bytes = (16 if self.setup.small else 512) << 20
        found: dict[tuple[int, int], float] = {}

        def measured_blocks(read_bytes: int, write_bytes: int) -> float:
            share = min(1.0, 4 * sample_bytes / (read_bytes + write_bytes))
            key = (math.ceil(share * read_bytes), math.ceil(share * write_bytes))
            if key not in found:
                with Disk(self.directory or "", *key, file_bytes=sample_bytes) as disk:
                    found[key] = min(time_of(disk.read_then_write), time_of(disk.read_while_writing))
            return found[key] / share

        return measured_blocks


def bench_of(setup: Setup, memory: str | None) -> Bench:
    end_s = time.perf_counter() + 0.95 * setup.seconds
    directory = next(iter(disk_directories([setup.scratch])), None)
    return Bench(setup, hardware_of(setup, directory, memory), directory, end_s)


def hardware_of(setup: Setup, directory: str | None, memory: str | None) -> penstock.Hardware:
    """This machine, measured, with one device of so much memory, the DRAM that a plan may use, and the scratch folder's
    disk."""
    measured = setup.scratch / "hardware.yaml"
    if setup.on_gpu and not measured.exists():
        penstock.Hardware.detect(measure=True).save(measured)
    ssds = [] if directory is None else [ssd_of(setup, directory)]
    dram_bytes = min(100 * 10**9, int(0.75 * ram_bytes()))
    if setup.small:
        small = SMALL[setup.device]
        return setup.hardware(None if memory is None and setup.on_gpu else small.memory).with_(
            dram=small.dram, ssds=ssds
        )
    return setup.hardware(memory).with_(dram=dram_bytes, ssds=ssds)


def ssd_of(setup: Setup, directory: str) -> dict[str, Any]:
    rates = disk_rates(directory, slice_s=0.1 if setup.small else 1.5)
    size_bytes = SMALL[setup.device].ssd_bytes if setup.small else free_space(setup.scratch)
    return {
        "size_bytes": size_bytes, "read_bandwidth": rates["disk_read"],
        "write_bandwidth": rates["disk_write"], "latency_s": rates["disk_latency_s"],
    }  # fmt: skip


def bound_rows(
    setup: Setup, job: penstock.Job, size: GptSize, rows: int, micro_batches: int, step_s: float, what: Row
) -> Iterator[Row]:
    """A step that was measured elsewhere, over the longest of its parts alone."""
    if not setup.on_gpu:
        return
    bench = Bench(setup, job.hardware, None, math.inf)
    parts = parts_alone(bench, job, computation_s(bench, Case("speed", size, rows, micro_batches, {})))
    bound_by = max(parts, key=lambda name: parts[name])
    more = {**what, "parts_s": parts, "bound_by": bound_by}
    yield note_call("step over the longest of its parts alone", step_s / parts[bound_by], **more)


def parts_alone(bench: Bench, job: penstock.Job, computed_s: float) -> dict[str, float]:
    """Seconds of each part of a step of ours, measured alone."""
    moved = {"h2d": 0, "d2h": 0, "read": 0, "write": 0}
    for route, num_bytes in job.last.moved_bytes.items():
        source = route.partition(" -> ")[0]
        if "ssd" in route:
            moved["read" if source.startswith("ssd") else "write"] += num_bytes
        else:
            moved["h2d" if source.startswith("dram") else "d2h"] += num_bytes
    stepped = [stage for stage, memory in job.plan.decisions.optimizer.items() if memory != ops.DEVICE]
    return seconds_alone(bench, moved, computed_s, sum(job.folder.interface.stages[s].trained_params for s in stepped))


def seconds_alone(bench: Bench, moved: Mapping[str, int], computed_s: float, on_host: int) -> dict[str, float]:
    """Seconds of each part that can run at the same time as others, measured alone: no step can be shorter than one.
    `moved`: bytes; `on_host`: parameters that are updated there."""
    (device,), host = bench.hardware.devices, bench.hardware.hosts[0]
    parts = {
        "computation": computed_s, "copies to the device": moved["h2d"] / device.h2d_bandwidth,
        "copies from the device": moved["d2h"] / device.d2h_bandwidth,
        "optimizer": on_host / host.optimizer_params_per_s,
    }  # fmt: skip
    if moved["read"] + moved["write"] and bench.directory is not None:
        parts["disk"] = bench.disk_s(moved["read"], moved["write"])
    return parts


def computation_s(bench: Bench, case: Case) -> float:
    """Seconds of forward and backward of a whole batch on a device with unlimited memory. For many layers they follow
    from a line through the seconds of two smaller numbers of layers, which fit any GPU."""
    few, more = (min(layers, case.size.layers) for layers in (FEW_LAYERS, 2 * FEW_LAYERS))
    of_few, of_more = (micro_batch_s(bench, case, layers) for layers in (few, more))
    slope = (of_more - of_few) / (more - few) if more > few else 0.0
    return case.micro_batches * (of_more + slope * (case.size.layers - more))


def micro_batch_s(bench: Bench, case: Case, layers: int) -> float:
    size, device = replace(case.size, layers=layers), bench.setup.device
    if size not in bench.known_s:
        with default_dtype(torch.bfloat16), torch.device(device):
            model = Gpt(size)
        batch = batch_of(size, case.rows)
        piece = {name: value.chunk(case.micro_batches)[0].to(device) for name, value in batch.items()}

        def compute() -> None:
            model(**piece)["loss"].backward()
            bench.setup.synchronize()

        compute()
        bench.known_s[size] = min(time_of(compute) for _ in range(3))
    return bench.known_s[size]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def time_of(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s
