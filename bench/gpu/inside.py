"""One more step of a job, looked into: the time that kernels and copies were at work, and what the allocator holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from penstock.bench.peers.gpu_setup import Row, Setup, note_call


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def look_inside(setup: Setup, job: Any, batch: Mapping[str, Tensor], what: Row) -> Iterator[Row]:
    """Two steps: one under torch's profiler, one after which the allocator's segments are counted."""
    if not setup.on_gpu:
        return
    setup.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin_s = time.perf_counter()
        job.step(batch)
        setup.synchronize()
        step_us = (time.perf_counter() - begin_s) * 1e6
    seen = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    moves = {"copies to the GPU": "Memcpy HtoD", "copies from the GPU": "Memcpy DtoH"}
    kinds = {kind: [event for event in seen if event.name.startswith(name)] for kind, name in moves.items()}
    kinds["kernels"] = [event for event in seen if not event.name.startswith(("Memcpy", "Memset"))]
    busy = {
        kind: union_length((event.time_range.start, event.time_range.end) for event in events) / step_us
        for kind, events in kinds.items()
    }
    why = {} if seen else {"why": "the profiler saw nothing on this GPU"}
    counts = {kind: len(events) for kind, events in kinds.items()}
    yield note_call(
        "share of a profiled step at work", busy, profiled_step_s=step_us / 1e6, calls=counts, **why, **what
    )
    yield from _memory(job, batch, what)


def _memory(job: Any, batch: Mapping[str, Tensor], what: Row) -> Iterator[Row]:
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python", context=None)
    try:
        torch.cuda.reset_peak_memory_stats()
        job.step(batch)
        snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    segments = snapshot["segments"]
    idle = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    accounted = max(job.last.peak_bytes[device.name] for device in job.hardware.devices)
    yield note_call(
        "reserved over accounted bytes", stats["reserved_bytes.all.peak"] / max(1, accounted), accounted=accounted,
        reserved=stats["reserved_bytes.all.peak"], allocated=stats["allocated_bytes.all.peak"],
        segments=len(segments), streams=len({segment["stream"] for segment in segments}),
        largest_idle_blocks=sorted(idle, reverse=True)[:4], events=sum(map(len, snapshot["device_traces"])),
        retries=stats["num_alloc_retries"], out_of_memory=stats["num_ooms"], **what,
    )  # fmt: skip
