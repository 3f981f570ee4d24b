"""The section `reservoir`: models whose training state fills DRAM and SSD, on one GPU limited to 24 GB of memory.

A step is compared with two bounds. One is the busiest of its own streams (computation, copies to and from the GPU, the
optimizer on the CPU, the disk). The other is the longest of these parts when each is measured alone: the model's
forward and backward passes on a GPU that holds it, and the bytes that a step moves at the rates of the links and of the
disk. The same run also times the plan without overlap, FSDP2 with CPU offload, and DeepSpeed if it is installed.

If the scratch folder cannot hold files past the page cache, plans have only DRAM, and a row says so. A plan for which
there is no time is skipped, with a row that says how long it would have taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

import penstock
from penstock.bench.peers.bound import Disk
from penstock.bench.peers.gpt import XL, Gpt, GptSize, batch_of
from penstock.bench.peers.gpu_offload import peers
from penstock.bench.peers.gpu_setup import GIB, Row, Setup, at_most, between, holds, noted
from penstock.compiler.strategies import STRATEGIES
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError, PenstockError
from penstock.runtime.measure.detect import ram_bytes
from penstock.runtime.measure.disks import disk_directories, disk_rates
from penstock.runtime.ssd.folder import free_space

STEP_TARGET = 1.15
STATE_BYTES = 14  # per parameter: bf16 weights, fp32 masters, AdamW's two moments
FUYOU = STRATEGIES["fuyou"]
APART = FUYOU.replace("overlap-optimizer", "overlap-optimizer{overlap=false}")
AS_DRAM_LACKS = FUYOU.replace("tier=all", "tier=auto")
SEVEN = GptSize(layers=32, width=4096, heads=32, vocabulary=50304, length=1024)  # 6.7 B parameters
TINY = GptSize(layers=6, width=64, heads=2, vocabulary=64, length=16)
ROUNDS, SEARCH_S, FEW_LAYERS = 3, 15.0, 8
START_S, START_BYTES_S = 15.0, 1.5e9  # guessed start of a job: seconds, and the rate of laying out and writing weights
PEER_SHARE = 0.3  # of the time that is left, for one peer
SHARE = 0.15  # of the section's time, for the steps of one plan; at least two steps run in any case


@dataclass(frozen=True)
class Case:
    """A model and a global batch. `plans` maps names to pipelines; `most` is the share of the remaining time that one
    of them may take; with `compared` the peers also run it."""

    name: str
    size: GptSize
    rows: int
    micro_batches: int
    plans: dict[str, str]
    most: float = 0.5
    compared: bool = False

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in Gpt(self.size).parameters())

    def described(self) -> Row:
        size = self.size
        return {
            "model": f"gpt {size.layers} x {size.width}, vocabulary {size.vocabulary}, sequence {size.length}",
            "case": self.name, "parameters": self.parameters, "batch": self.rows, "micro_batches": self.micro_batches,
        }  # fmt: skip


PLANS = {"fuyou": FUYOU, "no overlap": APART, "auto": "auto"}
CASES = (
    Case("1.5B", XL, 32, 8, PLANS, compared=True),
    Case("7B", SEVEN, 16, 8, {"fuyou, on SSD what DRAM lacks": AS_DRAM_LACKS, "auto": "auto"}, most=0.9),
)
SMALL_CASES = (Case("small", TINY, 4, 2, PLANS, compared=True),)


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

        def measured(read_bytes: int, write_bytes: int) -> float:
            share = min(1.0, 4 * sample_bytes / (read_bytes + write_bytes))
            key = (math.ceil(share * read_bytes), math.ceil(share * write_bytes))
            if key not in found:
                with Disk(self.directory or "", *key, file_bytes=sample_bytes) as disk:
                    found[key] = min(timed(disk.in_turn), timed(disk.at_once))
            return found[key] / share

        return measured


def reservoir(setup: Setup) -> Iterator[Row]:
    """Run the section. Rows of each model have a step's time, its bounds, the predictions, and the peers."""
    end_s = time.perf_counter() + 0.95 * setup.seconds
    directory = next(iter(disk_directories([setup.scratch])), None)
    bench = Bench(setup, hardware_of(setup, directory), directory, end_s)
    yield noted("memory and disks", bench.hardware.describe(), files=directory is not None)
    if directory is None:
        yield noted("plans have DRAM only", "no files past the page cache in the scratch folder, or less than 1 GiB")
    for case in SMALL_CASES if setup.small else CASES:
        yield from run_case(bench, case)
        if case.compared:
            yield from run_peers(bench, case)
    yield from run_largest(bench, SMALL_CASES[0] if setup.small else CASES[-1])


def hardware_of(setup: Setup, directory: str | None) -> penstock.Hardware:
    """This machine, measured, with one device of 24 GB, the DRAM that a plan may use, and the scratch folder's disk."""
    measured = setup.scratch / "hardware.yaml"
    if setup.on_gpu and not measured.exists():
        penstock.Hardware.detect(measure=True).save(measured)
    ssds = [] if directory is None else [ssd_of(setup, directory)]
    dram_bytes = min(100 * 10**9, int(0.75 * ram_bytes()))
    if setup.small:
        return setup.hardware("24MB").with_(dram="8MB", ssds=ssds)
    return setup.hardware("24GB").with_(dram=dram_bytes, ssds=ssds)


def ssd_of(setup: Setup, directory: str) -> dict[str, Any]:
    rates = disk_rates(directory, slice_s=0.1 if setup.small else 1.5)
    return {
        "size_bytes": 8 * 10**6 if setup.small else free_space(setup.scratch), "read_bandwidth": rates["disk_read"],
        "write_bandwidth": rates["disk_write"], "latency_s": rates["disk_latency_s"],
    }  # fmt: skip


# --- one model


def run_case(bench: Bench, case: Case) -> Iterator[Row]:
    """Run all plans of one model, and note the gain of overlap."""
    steps_s: dict[str, float] = {}
    for name, line in case.plans.items():
        what = {**case.described(), "plan": name, "files": bench.directory is not None}
        try:
            job = compiled(bench, case, line)
        except (DoesNotFit, PassError) as error:
            yield noted("a plan is skipped", str(error), **what)
            continue
        yield from run_plan(bench, case, job, what, steps_s)
    if {"fuyou", "no overlap"} <= steps_s.keys():
        yield noted("step without overlap over step", steps_s["no overlap"] / steps_s["fuyou"], **case.described())


def compiled(bench: Bench, case: Case, line: str) -> penstock.Job:
    """Compile a job. The model is on the meta device during planning, and then gets values that take no memory. Without
    a directory for files, the plan may keep everything in DRAM."""
    if bench.directory is None:
        line = line.replace("tier=all", "tier=auto")
    with torch.device("meta"):
        model = Gpt(case.size)
    job = penstock.compile(
        model, bench.hardware, example_inputs=inputs_of(case), optimizer=partial(torch.optim.AdamW, lr=1e-4),
        strategy=line, micro_batches=case.micro_batches, precision="bf16", search_s=SEARCH_S,
        ssd_dirs=None if bench.directory is None else [bench.directory],
    )  # fmt: skip
    give_values(model)
    return job


def inputs_of(case: Case) -> dict[str, Any]:
    shape = {"shape": [case.rows, case.size.length], "dtype": "int64"}
    return {"words": shape, "labels": shape}


def give_values(model: Gpt, seed: int = 0) -> None:
    """Set random weights that are views of one short row of numbers, each line of a matrix a little further along it.
    Billions of separate numbers would take minutes to draw, and the DRAM that the plan needs."""
    made = torch.Generator().manual_seed(seed)
    step, most = 61, max(param.shape[-1] + 61 * param.shape[0] for param in model.parameters() if param.dim() == 2)
    row = torch.randn(most, generator=made) * 0.02
    tied = model.head.weight is model.words.weight
    for name, param in list(model.named_parameters()):
        if param.dim() == 2:
            value = row.as_strided(param.shape, (step, 1))
        else:
            value = torch.full((1,), 1.0 if "norm" in name and name.endswith("weight") else 0.0).expand(param.shape)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, torch.nn.Parameter(value))
    if tied:
        model.head.weight = model.words.weight


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
        yield noted("a plan is skipped", took, predicted_s=predicted.step_s, **what)
        return
    batch, computed_s = batch_of(case.size, case.rows), computation_s(bench, case)
    bench.setup.tidy()
    begin_s = time.perf_counter()
    with job:
        losses = [float(job.step(batch))]
        yield noted("seconds to start and for the first step", time.perf_counter() - begin_s, **what)
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
        yield noted("step, tokens a second", case.rows * case.size.length / step_s, **what)
        streams = {name: statistics.median(row.get(name, 0.0) for row in busy) for name in busy[0]}
        alone = parts_alone(bench, job, computed_s)
        for figure, parts in (("its own streams", streams), ("its parts alone", alone)):
            bound_by = max(parts, key=lambda name: parts[name])
            more = {"parts_s": parts, "bound_by": bound_by, **what}
            ratio = step_s / parts[bound_by]
            if bench.setup.on_gpu:
                yield at_most(f"step over the longest of {figure}", ratio, STEP_TARGET, **more)
            else:
                yield noted(f"step over the longest of {figure}", ratio, **more)
        yield from predictions(bench, job, step_s, what)


def parts_alone(bench: Bench, job: penstock.Job, computed_s: float) -> dict[str, float]:
    """Seconds of each part that can run at the same time as others, measured alone: no step can be shorter than one."""
    (device,), host = bench.hardware.devices, bench.hardware.hosts[0]
    moved = {"h2d": 0, "d2h": 0, "read": 0, "write": 0}
    for route, num_bytes in job.last.moved_bytes.items():
        source = route.partition(" -> ")[0]
        if "ssd" in route:
            moved["read" if source.startswith("ssd") else "write"] += num_bytes
        else:
            moved["h2d" if source.startswith("dram") else "d2h"] += num_bytes
    stepped = [stage for stage, memory in job.plan.decisions.optimizer.items() if memory != ops.DEVICE]
    trained = sum(job.folder.interface.stages[stage].trained_params for stage in stepped)
    parts = {
        "computation": computed_s, "copies to the device": moved["h2d"] / device.h2d_bandwidth,
        "copies from the device": moved["d2h"] / device.d2h_bandwidth,
        "optimizer": trained / host.optimizer_params_per_s,
    }  # fmt: skip
    if moved["read"] + moved["write"]:
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
        bench.known_s[size] = min(timed(compute) for _ in range(3))
    return bench.known_s[size]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def predictions(bench: Bench, job: penstock.Job, step_s: float, what: Row) -> Iterator[Row]:
    predicted = job.plan.predicted
    ratio, more = predicted.step_s / step_s, {"predicted_s": predicted.step_s, **what}
    if bench.setup.on_gpu:
        yield between("predicted over measured step", ratio, 0.8, 1.2, **more)
        reserved = torch.cuda.max_memory_reserved() / job.hardware.devices[0].memory_bytes
        yield at_most("reserved by the allocator over the memory named", reserved, 1.0, **what)
    else:
        yield noted("predicted over measured step", ratio, **more)
    for memory, peak in job.last.peak_bytes.items():
        share = (predicted.peak_bytes.get(memory, 0) + 1) / (peak + 1)
        yield between(f"predicted over accounted peak of {memory}", share, 0.95, 1.05, peak_bytes=peak, **what)


def timed(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


# --- the peers, and the largest model


def run_peers(bench: Bench, case: Case) -> Iterator[Row]:
    """Run the peers on the same model, batch and device memory: one step to warm up, then `ROUNDS` more."""
    bench.setup.tidy()
    memory_bytes = bench.hardware.devices[0].memory_bytes if bench.setup.on_gpu else None
    for name, start in peers(bench.setup.device, memory_bytes, bench.directory).items():
        what = {**case.described(), "plan": name}
        try:
            with start(case.size, case.rows, case.micro_batches, PEER_SHARE * bench.left_s) as peer:
                first = peer.step()
                times_s, last = [], first
                for _ in range(ROUNDS):
                    begin_s = time.perf_counter()
                    last = peer.step()
                    times_s.append(time.perf_counter() - begin_s)
        except RuntimeError as error:  # with the end of the peer's output
            yield noted("a peer is skipped", str(error), **what)
            continue
        step_s = statistics.median(times_s)
        what |= {"step_s": step_s, "facts": peer.facts, "peak_rss_bytes": peer.peak_bytes, "losses": [first, last]}
        yield noted("step of a peer, tokens a second", case.rows * case.size.length / step_s, **what)


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
            job = compiled(bench, grown, AS_DRAM_LACKS)
            low, best = trial, (grown, job)
        except (DoesNotFit, PassError) as error:
            high, misses = trial, str(error)
        trial = (low + high) // 2
    if best is None:
        yield noted("the largest model that fits, a plan is skipped", misses or "no time is left to look for one")
        return
    grown, job = best
    what = {**grown.described(), "plan": "fuyou, on SSD what DRAM lacks"}
    bounds = {"layers_that_do_not_fit": high if misses else None, "why": misses}
    more = {"seconds_of_planning": time.perf_counter() - begin_s, **bounds, **what}
    yield noted("the largest model that fits, billions of parameters", grown.parameters / 1e9, **more)
    yield noted("DRAM and disk, GiB", room_bytes / GIB, **what)
    yield from run_plan(bench, grown, job, what, {})
