"""Models whose training state fills DRAM and SSD on one GPU, often limited to 24 GB of memory: the section
`reservoir`.

A step is compared with two bounds. One is the busiest of its own streams (computation, copies to and from the GPU, the
optimizer on the CPU, the disk). The other is the longest of these parts when each is measured alone: the model's
forward and backward passes on a GPU that holds it, and the bytes that a step moves at the rates of the links and of the
disk (gpu_bounds.py).

If the scratch folder cannot hold files past the page cache, plans have only DRAM, and a row says so. A plan for which
there is no time is skipped, with a row that says how long it would have taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench.gpu.inside import look_inside
from penstock.bench.peers.gpt import Gpt, batch_of
from penstock.bench.peers.gpu_bounds import Bench, bench_of, computation_s, parts_alone
from penstock.bench.peers.gpu_cases import AS_DRAM_LACKS, CASES, SMALL, Case
from penstock.bench.peers.gpu_setup import GIB, Row, Setup, holds, note_call, row_at_most, row_between
from penstock.ir.errors import DoesNotFit, PassError, PenstockError

STEP_TARGET = 1.15
STEP = "step, tokens a second"
STATE_BYTES = 14  # per parameter: bf16 weights, fp32 masters, AdamW's two moments
ROUNDS, SEARCH_S = 3, 15.0
START_S, START_BYTES_S = 5.0, 6e9  # of a job, about: seconds, and the rate of laying out and writing weights (H200)
SHARE = 0.15  # of the section's time, for the steps of one plan; at least two steps run in any case


def reservoir(setup: Setup) -> Iterator[Row]:
    """Run the section. Rows of its model have a step's time, its bounds, and the predictions."""
    bench = bench_of(setup, "24GB")
    yield from describe_kernel(bench)
    case = SMALL[setup.device].case if setup.small else CASES[-1]
    yield from run_case(bench, case)
    yield from run_largest(bench, case)


def describe_kernel(bench: Bench) -> Iterator[Row]:
    directory = bench.directory
    yield note_call("memory and disks", bench.hardware.describe(), files=directory is not None)
    if directory is None:
        yield note_call(
            "plans have DRAM only", "no files past the page cache in the scratch folder, or less than 1 GiB"
        )


def run_case(bench: Bench, case: Case) -> Iterator[Row]:
    """Run all plans of one model, and note the gain of overlap."""
    steps_s: dict[str, float] = {}
    why = ""
    for name, line in case.plans.items():
        what = {**case.facts(), "plan": name, "files": bench.directory is not None}
        try:
            job = compile_job(bench, case, line)
        except (DoesNotFit, PassError) as error:
            yield note_call("a plan is skipped", str(error), **what)
            why = str(error)
            continue
        yield from run_plan(bench, case, job, what, steps_s)
    if not steps_s:
        yield holds("one of the plans runs", False, error=why or "no time was left, or each failed", **case.facts())
    if {"fuyou", "no overlap"} <= steps_s.keys():
        yield note_call("step without overlap over step", steps_s["no overlap"] / steps_s["fuyou"], **case.facts())


def compile_job(bench: Bench, case: Case, line: str) -> penstock.Job:
    """Compile a job. The model is on the meta device during planning, and then gets values that take no memory. Without
    a directory for files, the plan may keep everything in DRAM."""
    if bench.directory is None:
        line = line.replace("tier=all", "tier=auto")
    with torch.device("meta"):
        model = Gpt(case.size)
    job = penstock.compile(
        model, bench.hardware, example_inputs=inputs_of(case), optimizer=partial(torch.optim.AdamW, lr=1e-4),
        strategy=line, micro_batches=case.micro_batches, precision=case.precision, search_s=SEARCH_S,
        ssd_dirs=None if bench.directory is None else [bench.directory],
    )  # fmt: skip
    give_values(model)
    return job


def inputs_of(case: Case) -> dict[str, Any]:
    shape = {"shape": [case.rows, case.size.length], "dtype": "int64"}
    return {"words": shape, "labels": shape}


def give_values(model: nn.Module, seed: int = 0) -> None:
    """Set random weights that are views of one short row of numbers, each line of a matrix a little further along it.
    Billions of separate numbers would take minutes to draw, and the DRAM that the plan needs. A weight of two modules
    stays one."""
    made = torch.Generator().manual_seed(seed)
    step, most = 61, max(param.shape[-1] + 61 * param.shape[0] for param in model.parameters() if param.dim() == 2)
    row = torch.randn(most, generator=made) * 0.02
    given: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param.dim() == 2:
            value = row.to(param.dtype).as_strided(param.shape, (step, 1))
        else:
            value = torch.full((1,), 1.0 if "norm" in name and name.endswith("weight") else 0.0).expand(param.shape)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, given.setdefault(param, nn.Parameter(value.to(param.dtype))))


def run_plan(bench: Bench, case: Case, job: penstock.Job, what: Row, steps_s: dict[str, float]) -> Iterator[Row]:
    """Run `measure_plan`; a failure becomes a row, so that the other plans still run."""
    try:
        yield from measure_plan(bench, case, job, what, steps_s)
    except (PenstockError, RuntimeError) as error:
        yield holds("the plan runs", False, error=f"{type(error).__name__}: {error}", **what)


def measure_plan(bench: Bench, case: Case, job: penstock.Job, what: Row, steps_s: dict[str, float]) -> Iterator[Row]:
    """Run a first step and some more, and yield their figures; `steps_s` gets the seconds of a step."""
    predicted, most_s = job.plan.predicted, case.most * bench.left_s
    start_s = 0.0 if bench.setup.small else START_S + STATE_BYTES * case.parameters / START_BYTES_S
    rounds = max(1, min(ROUNDS, int((SHARE * bench.setup.seconds - start_s) / predicted.step_s) - 1))
    need_s = start_s + 2 * predicted.step_s
    if need_s > most_s:
        took = f"the start and two steps take about {need_s:.0f} s, and it may have {max(0.0, most_s):.0f} s"
        yield note_call("a plan is skipped", took, predicted_s=predicted.step_s, **what)
        return
    batch, computed_s = batch_of(case.size, case.rows), computation_s(bench, case)
    bench.setup.tidy()
    begin_s = time.perf_counter()
    with limit_memory(bench), job:
        losses = [float(job.step(batch))]
        yield note_call("seconds to start and for the first step", time.perf_counter() - begin_s, **what)
        times_s, busy = [], []
        for _ in range(rounds):
            begin_s = time.perf_counter()
            losses.append(float(job.step(batch)))
            times_s.append(time.perf_counter() - begin_s)
            (shares,) = job.last.busy_share.values()
            busy.append({stream: share * job.last.seconds for stream, share in shares.items()})
        step_s = statistics.median(times_s)
        steps_s[what["plan"]] = step_s
        what |= {"step_s": step_s, "steps": rounds, "bottleneck": predicted.bottleneck}
        yield holds("the loss falls", losses[-1] < losses[0], losses=losses, **what)
        yield note_call(STEP, case.rows * case.size.length / step_s, **what)
        streams = {name: statistics.median(row.get(name, 0.0) for row in busy) for name in busy[0]}
        alone = parts_alone(bench, job, computed_s)
        for figure, parts in (("its own streams", streams), ("its parts alone", alone)):
            bound_by = max(parts, key=lambda name: parts[name])
            more = {"parts_s": parts, "bound_by": bound_by, **what}
            ratio = step_s / parts[bound_by]
            if bench.setup.on_gpu:
                yield row_at_most(f"step over the longest of {figure}", ratio, STEP_TARGET, **more)
            else:
                yield note_call(f"step over the longest of {figure}", ratio, **more)
        yield from predictions(bench, job, step_s, what)
        yield from look_inside(bench.setup, job, batch, what)


@contextmanager
def limit_memory(bench: Bench) -> Iterator[None]:
    """Hold this process to the memory that is named, as the peers are held to it."""
    if not bench.setup.on_gpu:
        yield
        return
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, bench.hardware.devices[0].memory_bytes / total_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def predictions(bench: Bench, job: penstock.Job, step_s: float, what: Row) -> Iterator[Row]:
    predicted = job.plan.predicted
    ratio, more = predicted.step_s / step_s, {"predicted_s": predicted.step_s, **what}
    if bench.setup.on_gpu:
        yield row_between("predicted over measured step", ratio, 0.8, 1.2, **more)
        reserved = torch.cuda.max_memory_reserved() / job.hardware.devices[0].memory_bytes
        yield row_at_most("reserved by the allocator over the memory named", reserved, 1.0, **what)
    else:
        yield note_call("predicted over measured step", ratio, **more)
    for memory, peak in job.last.peak_bytes.items():
        share = (predicted.peak_bytes.get(memory, 0) + 1) / (peak + 1)
        yield row_between(f"predicted over accounted peak of {memory}", share, 0.95, 1.05, peak_bytes=peak, **what)


def run_largest(bench: Bench, case: Case) -> Iterator[Row]:
    """Find the most layers of one shape for which there is a plan, and run steps of it if there is time."""
    hosts = bench.hardware.hosts[0]
    room_bytes = bench.hardware.dram_budget_bytes(0) + sum(ssd.budget_bytes for ssd in hosts.ssds)
    single = replace(case, size=replace(case.size, layers=1)).parameters
    per_layer = replace(case, size=replace(case.size, layers=2)).parameters - single
    guess = max(2, int((room_bytes / STATE_BYTES - single) / per_layer))
    low, high, best = 0, int(1.2 * guess) + 1, None
    misses, begin_s, most_s = "", time.perf_counter(), bench.left_s / 3
    trial = min(guess, high - 1)
    while high - low > max(1, guess // 12) and time.perf_counter() - begin_s < most_s:
        grown = replace(case, name="largest", size=replace(case.size, layers=trial))
        try:
            job = compile_job(bench, grown, AS_DRAM_LACKS)
            low, best = trial, (grown, job)
        except (DoesNotFit, PassError) as error:
            high, misses = trial, str(error)
        trial = (low + high) // 2
    if best is None:
        yield note_call("the largest model that fits, a plan is skipped", misses or "no time is left to look for one")
        return
    grown, job = best
    what = {**grown.facts(), "plan": "fuyou, on SSD what DRAM lacks"}
    bounds = {"layers_that_do_not_fit": high if misses else None, "why": misses}
    more = {"seconds_of_planning": time.perf_counter() - begin_s, **bounds, **what}
    yield note_call("the largest model that fits, billions of parameters", grown.parameters / 1e9, **more)
    yield note_call("DRAM and disk, GiB", room_bytes / GIB, **what)
    yield from run_plan(bench, grown, job, what, {})
