"""The sections of `bench/gpu_first.py`: each measures one promise on one device and yields rows of figures.

Every section also runs on a CPU device, with small sizes. It then leaves out what only a GPU has (its allocator, its
clock), and the rest of the code is the same.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.gpu.inside import look_inside
from penstock.bench.peers import parity
from penstock.bench.peers.gpt import BASE, MEDIUM, SMALL, XL, GptSize, batch_of, gpt
from penstock.bench.peers.gpu_bounds import bound_rows
from penstock.bench.peers.gpu_long import long_sequence
from penstock.bench.peers.gpu_reservoir import reservoir
from penstock.bench.peers.gpu_setup import GIB, Row, Setup, holds, note_call, row_at_least, row_at_most, row_between
from penstock.bench.peers.timing import alternate
from penstock.compiler.strategies import PIPELINE
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.presets import gpu
from penstock.runtime.measure.detect import known_part
from penstock.runtime.simulate import Timeline
from penstock.tests.zoo import wide_resnet

MOST_LIBRARY_MIB = 256
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
WIDE = GptSize(layers=24, width=1024, heads=16, vocabulary=16384, length=1024)  # 320 M parameters
TINY = GptSize(layers=2, width=32, heads=2, vocabulary=64, length=16)
FRACTIONS = (0.35, 0.45, 0.55, 0.7, 0.85)  # of the memory that a resident plan takes


def compile_job(
    setup: Setup, model: nn.Module, batch: Mapping[str, Tensor], memory: str | int | None = None, stages: int = 0,
    **options: Any,
) -> penstock.Job:  # fmt: skip
    """Compile a job, with exactly `stages` stages if given, else as the search prefers."""
    strategy = "auto"
    if stages:
        strategy = PIPELINE.replace("partition-balanced", f"partition-balanced{{stages={stages}}}")
    given = {"micro_batches": parity.MICRO_BATCHES, "optimizer": ADAMW, "strategy": strategy, **options}
    return penstock.compile(model, setup.hardware(memory), example_inputs=batch, **given)


def swapping_job(
    setup: Setup, model: nn.Module, batch: Mapping[str, Tensor], roomy: bool = False, resident_too: bool = False,
    **options: Any,
) -> penstock.Job:  # fmt: skip
    """Compile a job for a device so small that stages are fetched: the smallest of `FRACTIONS` that works, or with
    `roomy` the largest. `resident_too`: some stages stay."""
    resident = compile_job(setup, model, batch, **options)
    peak_bytes = max(resident.plan.predicted.peak_bytes[device.name] for device in resident.hardware.devices)
    misses = []
    for fraction in reversed(FRACTIONS) if roomy else FRACTIONS:
        try:
            job = compile_job(setup, model, batch, memory=int(fraction * peak_bytes), **options)
        except DoesNotFit as error:
            misses.append(str(error))
            continue
        if job.plan.decisions.fetch and (job.plan.decisions.resident or not resident_too):
            return job
    raise DoesNotFit(f"no fraction of {peak_bytes} bytes lets this model swap: {misses[-1]}")


def allocator_peak(setup: Setup, job: penstock.Job, batch: Mapping[str, Tensor], before_bytes: int) -> tuple[int, int]:
    """Bytes that torch's allocator held at the peak of one more step without workspaces of libraries; and these bytes.

    Workspaces of libraries are what is allocated between steps beyond the account: cuBLAS takes some once per stream
    and thread. `before_bytes` were allocated before the job began. Returns zeros without a GPU.
    """
    if not setup.on_gpu:
        job.step(batch)
        return 0, 0
    lasting_bytes = job.driver.session.state.memory.accounts[ops.DEVICE].live_bytes
    library_bytes = torch.cuda.memory_allocated() - before_bytes - lasting_bytes
    torch.cuda.reset_peak_memory_stats()
    job.step(batch)
    return torch.cuda.max_memory_allocated() - before_bytes - library_bytes, library_bytes


# --- sections


def machine(setup: Setup) -> Iterator[Row]:
    """Check whether the machine that `Hardware.detect` finds is plausible."""
    found = penstock.Hardware.detect(measure=setup.on_gpu)
    if setup.on_gpu:
        found.save(setup.scratch / "hardware.yaml")
        yield note_call("hardware document", (setup.scratch / "hardware.yaml").read_text())
    device, host = found.devices[0], found.hosts[0]
    yield note_call("hardware", found.describe())
    part = known_part(torch.cuda.get_device_name()) if setup.on_gpu else None
    if part is not None:
        sheet = gpu(part, 0)
        for dtype, peak in device.peak_flops.items():
            share = peak * device.achieved_fraction[dtype] / sheet["peak_flops"][dtype]
            yield row_between(f"{dtype} matrix products over the datasheet's peak", share, 0.15, 1.1)
        share = device.memory_bandwidth / sheet["memory_bandwidth"]
        yield row_between("memory bandwidth over the datasheet's", share, 0.5, 1.1)
    for name in ("h2d_bandwidth", "d2h_bandwidth"):
        yield row_between(f"{name}, GB/s", getattr(device, name) / 1e9, 1.0, 500.0)
    yield row_between("memory, GiB", device.memory_bytes / GIB, 0.1, 512.0)
    yield row_between("launch of one call, us", device.op_overhead_s * 1e6, 0.1, 100.0)
    yield row_between("AdamW on the host, million parameters a second", host.optimizer_params_per_s / 1e6, 10, 50_000)


def same_numbers(setup: Setup) -> Iterator[Row]:
    """Training by plans of every kind against eager PyTorch on the same device."""
    parity.exact_arithmetic()
    size = SMALL if setup.small else GptSize(layers=4, width=256, heads=4, vocabulary=1024, length=128)
    batches = [batch_of(size, 4, seed) for seed in range(parity.STEPS)]
    model, dropping = gpt(size), gpt(GptSize(**{**vars(size), "dropout": 0.1}))
    precisions = ("fp32", "bf16") if setup.small else ("fp32", "bf16", "fp16")
    for precision in precisions:
        shared = {"precision": precision, "optimizer": parity.SGD}
        wanted = parity.train_eager(model, batches, setup.device, precision)
        setup.tidy()
        for name, make in (
            ("resident", partial(compile_job, stages=1)),
            ("resident, 2 stages", partial(compile_job, stages=2)),
            ("swapped", swapping_job),
        ):
            yield from _parity(name, precision, make(setup, model, batches[0], **shared), model, batches, wanted)
        wanted = parity.train_eager(dropping, batches, setup.device, precision)
        setup.tidy()
        job = compile_job(setup, dropping, batches[0], stages=1, **shared)
        yield from _parity("dropout", precision, job, dropping, batches, wanted)
    convolutions, _ = wide_resnet(dropout=0.0)
    images = [_images(seed) for seed in range(parity.STEPS)]
    wanted = parity.train_eager(convolutions, images, setup.device)
    job = compile_job(setup, convolutions, images[0], stages=1, optimizer=parity.SGD)
    yield from _parity("BatchNorm", "fp32", job, convolutions, images, wanted)


def _images(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 3, 8, 8, generator=made), "labels": torch.randint(0, 4, (8,), generator=made)}


def _parity(
    name: str, precision: str, job: penstock.Job, model: nn.Module, batches: Sequence[Mapping[str, Tensor]],
    wanted: parity.Trained,
) -> Iterator[Row]:  # fmt: skip
    with job:
        found = parity.train_job(job, batches)
        apart = parity.compare(found, wanted, parity.start_of(model))
        loss, weights = parity.LIMITS[precision]
        stages = len(job.plan.decisions.stages)
        what = {"plan": name, "precision": precision, "stages": stages, "bitwise": apart.bitwise}
        yield row_at_most("difference of the loss from eager", apart.loss, loss, **what)
        yield row_at_most("difference of the weights over their way from the start", apart.weights, weights, **what)
        if wanted.buffers:
            pairs = [(found.buffers[name].double(), value.double()) for name, value in wanted.buffers.items()]
            yield holds("buffers are eager's", all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs), **what)


def step_time(setup: Setup) -> Iterator[Row]:
    """A resident plan against eager with the same micro-batches."""
    size, rows, rounds = (SMALL, 4, 3) if setup.small else (BASE, 16, 12)
    batch, micro_batches = batch_of(size, rows), 4
    for precision in ("fp32", "bf16"):
        model = gpt(size, setup.device)
        eager = _Eager(model, setup.device, precision, micro_batches)
        with compile_job(setup, model, batch, stages=1, precision=precision, micro_batches=micro_batches) as job:

            def run_eager(eager: _Eager = eager) -> None:
                eager.step(batch)
                setup.synchronize()

            times_s = alternate({"penstock": partial(job.step, batch), "eager": run_eager}, rounds)
            medians = {name: statistics.median(found) for name, found in times_s.items()}
            what = {
                "precision": precision, "step_s": medians, "model": _words(size), "batch": rows,
                "micro_batches": micro_batches, "resident": not job.plan.decisions.fetch,
            }  # fmt: skip
            yield row_at_most("step over eager's", medians["penstock"] / medians["eager"], 1.05, **what)
            yield from _prediction(job, medians["penstock"], setup)
            if precision == "bf16":
                yield from bound_rows(setup, job, size, rows, micro_batches, medians["penstock"], what)
            yield from look_inside(setup, job, batch, what)
        del eager, run_eager, model
        setup.tidy()


class _Eager:
    """A training loop as a user would write it: autocast over fp32 weights, accumulated gradients, fused AdamW."""

    def __init__(self, model: nn.Module, device: str, precision: str, micro_batches: int):
        self.model = copy.deepcopy(model).to(device).train()
        self.device, self.precision, self.micro_batches = device, precision, micro_batches
        self.optimizer = ADAMW(self.model.parameters(), fused=True)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for m in range(self.micro_batches):
            piece = {name: value.chunk(self.micro_batches)[m].to(self.device) for name, value in batch.items()}
            with nullcontext() if self.precision == "fp32" else torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.model(**piece)["loss"]
            (loss / self.micro_batches).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return float(torch.stack(losses).mean())


def accounting(setup: Setup) -> Iterator[Row]:
    """The device's memory as the plan predicts it, as the runtime accounts it, and as torch's allocator took it."""
    size, rows = (SMALL, 4) if setup.small else (MEDIUM, 16)
    for precision in ("fp32", "bf16"):
        model, batch = gpt(size), batch_of(size, rows)
        for name, make in (("resident", partial(compile_job, stages=2)), ("swapped", swapping_job)):
            setup.tidy()
            before = torch.cuda.memory_allocated() if setup.on_gpu else 0
            with make(setup, model, batch, precision=precision) as job:
                job.step(batch)
                predicted = job.plan.predicted.peak_bytes
                job.step(batch)  # from this step on the account has measured sizes of what forward keeps
                taken_bytes, library_bytes = allocator_peak(setup, job, batch, before)
                what = {"plan": name, "precision": precision, "accounted_bytes": job.last.peak_bytes}
                for memory, peak in job.last.peak_bytes.items():
                    share = (predicted[memory] + 1) / (peak + 1)  # a resident plan takes no DRAM
                    yield row_between(f"predicted over accounted peak of {memory}", share, 0.95, 1.05, **what)
                if setup.on_gpu:
                    accounted = job.last.peak_bytes[job.hardware.devices[0].name]
                    yield row_between("allocated over accounted peak", taken_bytes / accounted, 0.6, 1.05, **what)
                    yield row_at_most("allocated for libraries, MiB", library_bytes / 2**20, MOST_LIBRARY_MIB, **what)
                    yield note_call("reserved by the allocator, bytes", torch.cuda.max_memory_reserved(), **what)


def swapping(setup: Setup) -> Iterator[Row]:
    """Transfers during computation, on a device that cannot hold the model's training state."""
    size, rows, micro_batches, memory = (SMALL, 4, 2, None) if setup.small else (WIDE, 32, 8, "6GB")
    model, batch = gpt(size, setup.device), batch_of(size, rows)
    options = {"precision": "bf16", "micro_batches": micro_batches}
    make = partial(compile_job, memory=memory) if memory else partial(swapping_job, roomy=True)
    with make(setup, model, batch, **options) as job:
        yield holds("stages are fetched", bool(job.plan.decisions.fetch))
        yield from _busy_rows(setup, job, batch, size, rows, rounds=3 if setup.small else 6)
        share = share_under(job.timeline(), ops.H2D, ops.COMPUTE)
        yield row_at_least("share of fetching that lies under computation", share, 0.0 if setup.small else 0.5)


def large_model(setup: Setup) -> Iterator[Row]:
    """A model of 1.5 billion parameters on a GPU limited to 8 GB, then to 24 GB."""
    size, rows, micro_batches = (TINY, 4, 2) if setup.small else (XL, 32, 16)
    model, batch = gpt(size, setup.device), batch_of(size, rows)
    for memory in ("1MB",) if setup.small else ("8GB", "24GB"):
        setup.tidy()
        begin_s = time.perf_counter()
        with compile_job(setup, model, batch, memory, precision="bf16", micro_batches=micro_batches) as job:
            planned_s = time.perf_counter() - begin_s
            yield note_call("plan and print, s", planned_s, memory=memory, stages=len(job.plan.decisions.stages))
            yield from _busy_rows(setup, job, batch, size, rows, rounds=3, memory=memory)
            if setup.on_gpu:
                share = torch.cuda.max_memory_reserved() / job.hardware.devices[0].memory_bytes
                yield row_at_most("reserved by the allocator over the memory named", share, 1.0, memory=memory)


def _busy_rows(
    setup: Setup, job: penstock.Job, batch: Mapping[str, Tensor], size: GptSize, rows: int, rounds: int, **more: Any
) -> Iterator[Row]:
    """Rows of the step time over the busiest of the streams that should run at the same time."""
    losses, times_s, busy = [float(job.step(batch))], [], []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        losses.append(float(job.step(batch)))
        times_s.append(time.perf_counter() - begin_s)
        (shares,) = job.last.busy_share.values()
        busy.append({stream: share * job.last.seconds for stream, share in shares.items()})
    step_s = statistics.median(times_s)
    streams = {name: statistics.median(row.get(name, 0.0) for row in busy) for name in busy[0]}
    what = {"model": _words(size), "batch": rows, "step_s": step_s, "busy_s": streams, **more}
    yield holds("the loss falls", losses[-1] < losses[0], losses=losses, **more)
    yield note_call("tokens a second", rows * size.length / step_s, **more)
    links = max(streams.get(name, 0.0) for name in (ops.H2D, ops.D2H))
    bound_s = max(streams.get(ops.COMPUTE, 0.0), links)
    yield row_at_most("step over the larger of computation and transfers", step_s / bound_s, 1.15, **what)
    yield note_call(
        "step over the busiest stream, the optimizer's on the host too", step_s / max(streams.values()), **what
    )
    yield from _prediction(job, step_s, setup, **more)
    yield from bound_rows(setup, job, size, rows, job.plan.micro_batches, step_s, what)
    yield from look_inside(setup, job, batch, what)


def _prediction(job: penstock.Job, step_s: float, setup: Setup, **more: Any) -> Iterator[Row]:
    predicted_s = job.plan.predicted.step_s
    if setup.on_gpu:
        ratio = predicted_s / step_s
        yield row_between("predicted over measured step", ratio, 0.8, 1.2, predicted_s=predicted_s, **more)
    else:
        yield note_call("predicted over measured step", predicted_s / step_s, predicted_s=predicted_s, **more)


def share_under(timeline: Timeline, inner: str, outer: str) -> float:
    """The share of one stream's busy time during which another stream was busy, too."""
    spans = {name: [s for s in timeline.spans if s.stream == name] for name in (inner, outer)}
    total = sum(s.end_s - s.start_s for s in spans[inner])
    both = sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in spans[inner] for b in spans[outer]
    )  # spans of one stream do not overlap each other
    return both / total if total else 0.0


def _words(size: GptSize) -> str:
    return f"gpt {size.layers} x {size.width}, vocabulary {size.vocabulary}, sequence {size.length}"


SECTIONS = {
    "machine": machine, "parity": same_numbers, "step-time": step_time, "accounting": accounting, "swapping": swapping,
    "large-model": large_model, "long-sequence": long_sequence, "reservoir": reservoir,
}  # fmt: skip
