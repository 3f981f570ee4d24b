"""The host's time for each instruction of a step, beside the calls of torch that launch kernels and record events.

The calls of a bound program are timed by the processor time of the thread that makes them and of autograd's own
threads, so that a busy machine shows little. What torch itself takes within them (the stage's module, the engine's
backward, copies, the optimizer's step, events) is timed in the same run and subtracted. What hooks and modes cost
inside of a module shows between plans of the same stages, with launches. Kernels are to cost nothing: run it under the
emulated device (tests/fakecuda) with FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1.

Real plans: Llama2-7B on one GPU is issued in full, as the same program of a model of 32 narrow layers,
as the host's cost does not depend on widths; for 70B on eight GPUs, the instructions of each device are counted and
take what each kind took in 7B's.

Run: FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py [--label after] [--only swapped]
     FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py --plans      whole steps of both
     FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py --graphs     with and without graphs
     FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py --bytecodes  counted, on a busy machine
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.gpt import GptSize, batch_of, gpt
from penstock.bench.peers.gpu_sections import ADAMW, Setup, compile_job, swapping_job
from penstock.compiler.models.named import find_model
from penstock.compiler.strategies import PIPELINE
from penstock.ir.calls import op_of
from penstock.runtime.device.prepare import Issue
from penstock.runtime.device.runtime import DeviceRuntime
from penstock.runtime.stage import runner as stage_runner
from penstock.runtime.stage.store import StageStore

SIZE = GptSize(layers=8, width=64, heads=4, vocabulary=256, length=32)
MICRO_BATCHES, STEPS = 8, 7
FETCHING = PIPELINE.replace("partition-balanced", "partition-balanced{stages=8}")
KEEPING = (
    "drop-masks, coarsen, partition-min-stage, map-round-robin, schedule-pipeline, "
    "choose-activations{swap=true, tier=none, to=dram, share=0.5}, insert-fetch{swap=true}, insert-optimizer"
)
AGAIN = f"recompute-pointwise, {PIPELINE.replace('partition-balanced', 'partition-balanced{stages=4}')}"
REAL_7B, REAL_70B = ("llama2-7b", "rtx4090x1", 8), ("llama2-70b", "rtx4090x8-2rc", 16)  # model, preset, rows
NARROW = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=4,vocab_size=256"
REAL_STRATEGY, TOKENS, FEW_TOKENS = "min-stage", 2048, 32
COMPUTED = ("forward", "backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="after", help="which state of the code this is")
    parser.add_argument("--only", help="this plan alone, such as swapped")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--bytecodes", action="store_true")
    args = parser.parse_args()
    setup = LittleDram("cuda", small=True, scratch=Path("/nonexistent"))
    about = {"state": args.label, "kernels_cost_nothing": os.environ.get("FAKECUDA_COMPUTE") == "0"}
    if args.plans:
        for row in whole_steps(setup):
            rows.save("host_cost", about | row)
        return
    if args.graphs:
        rows.save("host_cost", about | with_graphs(setup))
        return
    batch = batch_of(SIZE, MICRO_BATCHES)
    options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "optimizer": ADAMW}
    jobs: dict[str, Callable[[], penstock.Job]] = {
        "resident": lambda: compile_job(setup, gpt(SIZE), batch, stages=4, **options),
        "resident, pointwise again": lambda: compile_job(setup, gpt(SIZE), batch, strategy=AGAIN, **options),
        "swapped": lambda: swapping_job(setup, gpt(SIZE), batch, strategy=FETCHING, **options),
        "swapped, classes kept": lambda: compile_job(setup, gpt(SIZE), batch, strategy=KEEPING, **options),
    }
    for plan, make in jobs.items():
        if args.only in (None, plan):
            with make() as job:
                found = count_bytecodes(job, batch) if args.bytecodes else measure(job, batch)
                rows.save("host_cost", {"plan": plan, **about, **found})


class LittleDram(Setup):
    """A machine that the plans fit wherever they run."""

    def hardware(self, memory: str | int | None = None) -> penstock.Hardware:
        return super().hardware(memory).with_(dram="2GB")


# --- CUDA graphs


def with_graphs(setup: Setup) -> dict[str, Any]:
    """Processor time of a forward and a backward with all that they launch, with and without graphs, in turns."""
    batch = batch_of(SIZE, MICRO_BATCHES)
    options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "optimizer": ADAMW}
    found: dict[str, Any] = {"plan": "resident, with graphs and as written"}
    with ExitStack() as jobs:
        both = {
            name: jobs.enter_context(compile_job(setup, gpt(SIZE), batch, stages=4, cuda_graphs=graphs, **options))
            for name, graphs in (("graphs", True), ("as written", False))
        }
        for job in both.values():
            job.step(batch)
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in both}
        for turn in range(STEPS + 3):
            for name, job in both.items():
                spans = whole_spans(job, batch)
                if turn >= 3:
                    taken[name].append(spans)
    for kind in (*COMPUTED, "step"):
        for name, spans in taken.items():
            found[f"us_a_{kind}, {name}"] = statistics.median(each[kind] for each in spans)
        ratios = [ours[kind] / plain[kind] for ours, plain in zip(taken["graphs"], taken["as written"])]
        found[f"share_of_a_{kind}"] = statistics.median(ratios)
    return found


def whole_spans(job: penstock.Job, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Microseconds of one step's forwards and backwards, each on average, and of the whole step."""
    clock, spans = Clock(), Kinds()

    def note(issue: Issue, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted_call(run: Any) -> None:
            start_ns = clock.now_ns()
            call(run)
            spans.add(issue.op, clock.now_ns() - start_ns)

        return noted_call if issue.op in COMPUTED else call

    with replaced_calls(bound_step(job), note):
        spans.add("step", clock.span_ns(lambda: job.step(batch)))
    return spans.means()


def bound_step(job: penstock.Job) -> DeviceRuntime:
    """The step of the only device, bound by the first one."""
    session: Any = job.driver.session  # type: ignore[attr-defined]
    found: DeviceRuntime = session.bound["step"]
    return found


@contextmanager
def replaced_calls(bound: DeviceRuntime, made_of: Callable[[Issue, Callable[[Any], None]], Any]) -> Iterator[None]:
    """Issue other calls in place of a program's own."""
    own = bound.calls
    bound.calls = [made_of(issue, call) for issue, call in zip(bound.issues, own, strict=True)]
    try:
        yield
    finally:
        bound.calls = own


# --- whole steps of real plans


def whole_steps(setup: Setup) -> Iterator[dict[str, Any]]:
    """The host's seconds for a step of 7B on one GPU, issued, and of 70B on eight, by kinds."""
    model, _, num_rows = REAL_7B
    wanted = counts_of(real(*REAL_7B))[0]
    narrow = find_model(f"{model}:{NARROW}")
    batch = narrow.random_batch(num_rows, FEW_TOKENS)
    options: dict[str, Any] = {"precision": "bf16-true", "micro_batches": num_rows, "optimizer": ADAMW}
    with swapping_job(setup, narrow.load(), batch, strategy=REAL_STRATEGY, **options) as job:
        counts = counts_of(job)[0]
        found = measure(job, batch)
    same = {"instructions_of_the_real_plan": wanted, "same_program": counts == wanted}
    yield {"plan": "llama2-7b on one rtx4090, narrow", **same, **found}
    devices = counts_of(real(*REAL_70B))
    busiest = max(devices, key=lambda device: whole_step(found, device))
    yield {
        "plan": "llama2-70b on eight rtx4090, by 7B's costs of each kind",
        "instructions": sum(busiest.values()),
        "instructions_by_kind": busiest,
        "kinds_at_the_mean_of_others": sorted(busiest.keys() - found["us_by_kind"].keys()),
        "ms_a_step": whole_step(found, busiest) / 1e3,
        "ms_a_step_with_launches": whole_step(found, busiest, "us_with_launches_by_kind") / 1e3,
    }


def real(model: str, preset: str, num_rows: int) -> penstock.Job:
    """The plan of the model as it is, for the machine."""
    named = find_model(model)
    return penstock.compile(
        named.on_meta(),
        penstock.Hardware.preset(preset, dram="2048GB"),
        example_inputs=named.batch_spec(num_rows, TOKENS),
        precision="bf16-true",
        micro_batches=num_rows,
        strategy=REAL_STRATEGY,
    )


def counts_of(job: penstock.Job) -> list[dict[str, int]]:
    """The instructions of each device's step, by kind."""
    return [dict(Counter(op_of(node).name for node in program.ops())) for program in job.programs]


def whole_step(found: Mapping[str, Any], counts: Mapping[str, int], costs: str = "us_by_kind") -> float:
    """The host's microseconds for a step of these instructions, if each kind costs what it cost here; a kind that did
    not occur here costs what the others cost on average, forwards and backwards aside."""
    cost, number = found[costs], found["instructions_by_kind"]
    light = [kind for kind in cost if kind not in COMPUTED]
    usual = sum(cost[kind] * number[kind] for kind in light) / sum(number[kind] for kind in light)
    around = found["us_around_per_instruction"]
    return sum(n * (cost.get(kind, usual) + around) for kind, n in counts.items())


# --- measuring one plan


class Clock:
    """Processor time of the calling thread and of autograd's threads."""

    def __init__(self) -> None:
        tasks = Path("/proc/self/task")
        own = {int(task.name): (task / "comm").read_text() for task in tasks.iterdir()}
        # The kernel's number for a clock of one thread: see clock_gettime(3) and CPUCLOCK_PERTHREAD.
        self.others = [(~task << 3) | 6 for task, name in own.items() if name.startswith("pt_autograd")]

    def now_ns(self) -> int:
        return time.thread_time_ns() + sum(time.clock_gettime_ns(clock) for clock in self.others)

    def least_ns(self) -> int:
        """The least nanoseconds between two readings."""
        return min(-self.now_ns() + self.now_ns() for _ in range(1000))

    def span_ns(self, run: Callable[[], Any]) -> int:
        start_ns = self.now_ns()
        run()
        return self.now_ns() - start_ns


class TorchShare:
    """Times the outermost calls of torch that the issuing thread makes. `launches_ns`, `events_ns`: taken so far;
    `calls`: their number, `around_ns`: what timing takes outside of each."""

    def __init__(self, clock: Clock):
        self.clock, self.least_ns = clock, clock.least_ns()
        self.launches_ns = self.events_ns = self.calls = 0
        self.is_inside, self._thread = False, threading.get_ident()
        nothing = self.time_of(lambda: None)
        spans_ns = [clock.span_ns(nothing) for _ in range(1000)]
        self.around_ns = max(int(statistics.median(spans_ns)) - self.least_ns, 0)

    def time_of(self, call: Callable[..., Any], kind: str = "launches_ns") -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside or threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            self.is_inside = True
            start_ns = self.clock.now_ns()
            try:
                return call(*args, **kwargs)
            finally:
                taken_ns = self.clock.now_ns() - start_ns - self.least_ns
                setattr(self, kind, getattr(self, kind) + taken_ns)
                self.calls += 1
                self.is_inside = False

        return timed_call

    @contextmanager
    def watch(self, stores: Iterable[StageStore]) -> Iterator[None]:
        """Time what the instructions of these stages call."""
        with ExitStack() as patches:
            for name in ("copy_", "to", "pin_memory"):
                call = getattr(Tensor, name)
                patches.enter_context(patch.object(Tensor, name, self.time_of(call)))
            for owner, name in ((torch.cuda.Event, "record"), (torch.cuda.Stream, "wait_event")):
                patches.enter_context(patch.object(owner, name, self.time_of(getattr(owner, name), "events_ns")))
            engine = stage_runner.engine_run_backward
            patches.enter_context(patch.object(stage_runner, "engine_run_backward", self.time_of(engine)))
            for store in stores:
                patches.enter_context(patch.object(store.runner, "module", self.time_of(store.runner.module)))
                if store.optimizer is not None and store.optimizer.optimizer is not None:
                    optimizer = store.optimizer.optimizer
                    patches.enter_context(patch.object(optimizer, "step", self.time_of(optimizer.step)))
            yield


class Taken(NamedTuple):
    """Nanoseconds of one instruction or of a step, all in all, and those of them that torch took."""

    whole_ns: int
    launches_ns: int
    events_ns: int

    @property
    def net_ns(self) -> int:
        return self.whole_ns - self.launches_ns - self.events_ns


class Watch:
    """Times calls. The clock is read once before and once after."""

    def __init__(self, clock: Clock, share: TorchShare):
        self.clock, self.share, self.least_ns = clock, share, clock.least_ns()

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        share = self.share
        launches_ns, events_ns, calls = share.launches_ns, share.events_ns, share.calls
        start_ns = self.clock.now_ns()
        result = run(*args, **kwargs)
        whole_ns = self.clock.now_ns() - start_ns - self.least_ns - (share.calls - calls) * share.around_ns
        return result, Taken(whole_ns, share.launches_ns - launches_ns, share.events_ns - events_ns)


def measure(job: penstock.Job, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The least over steps of each instruction, net, as all else is the machine's other work; their mean by kind."""
    for _ in range(3):
        job.step(batch)
    session: Any = job.driver.session  # type: ignore[attr-defined]
    clock, bound, fed = Clock(), bound_step(job), {}
    watch = Watch(clock, TorchShare(clock))
    taken: list[tuple[str, Taken]] = []
    runs, around_ns, plain_ns = [], [], []

    def time_call(issue: Issue, call: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda run: taken.append((issue.op, watch.call(call, run)[1]))

    def note_batch(run: Any) -> None:
        fed.update(run.batch)
        DeviceRuntime.issue(bound, run)

    with patch.object(bound, "issue", note_batch):
        job.step(batch)
    for _ in range(STEPS):  # in turns, as the machine is busy at times
        taken.clear()
        with watch.share.watch(session.state.stores.values()), replaced_calls(bound, time_call):
            _, whole = watch.call(session.step, fed)
        around_ns.append(whole.net_ns - sum(each.net_ns for _, each in taken))
        runs.append(list(taken))
        plain_ns.append(clock.span_ns(lambda: session.step(fed)))
    net, gross, events = Kinds(), Kinds(), Kinds()
    for row in zip(*runs, strict=True):
        kind = row[0][0]
        net.add(kind, min(taken.net_ns for _, taken in row))
        gross.add(kind, min(taken.whole_ns for _, taken in row))
        events.add(kind, min(taken.events_ns for _, taken in row))
    around_us = min(around_ns) / 1e3
    return {
        "instructions": len(net.all()),
        "us_an_instruction": statistics.mean(net.all()),
        "us_a_light_instruction": statistics.mean(net.all(but=COMPUTED)),
        "us_by_kind": net.means(),
        "us_for_events_by_kind": events.means(),
        "us_with_launches_by_kind": gross.means(),
        "instructions_by_kind": {kind: len(taken) for kind, taken in net.items()},
        "us_around_per_instruction": around_us / len(net.all()),  # before the first and after the last
        "ms_a_step": (sum(net.all()) + around_us) / 1e3,
        "ms_a_step_with_launches": min(plain_ns) / 1e6,
    }


# --- counting, which other work of the machine does not change


def count_bytecodes(job: penstock.Job, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The mean bytecodes of each kind of instruction in one step, with those that go from one to the next, outside of
    the calls of torch that `TorchShare` times."""
    for _ in range(4):
        job.step(batch)
    session: Any = job.driver.session  # type: ignore[attr-defined]
    share, bound, found, kind = TorchShare(Clock()), bound_step(job), Counter[str](), [""]
    around = {TorchShare.time_of.__code__, begin_kind.__code__}

    def count(frame: Any, event: str, arg: Any) -> Any:
        found[kind[0]] += event == "opcode" and not share.is_inside
        return count

    def begin(frame: Any, event: str, arg: Any) -> Any:
        if share.is_inside or any(frame.f_code in code.co_consts for code in around):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    def count_issue(run: Any) -> None:
        sys.settrace(begin)
        try:
            DeviceRuntime.issue(bound, run)
        finally:
            sys.settrace(None)

    calls = replaced_calls(bound, lambda issue, call: begin_kind(kind, issue.op, call))
    with share.watch(session.state.stores.values()), calls, patch.object(bound, "issue", count_issue):
        job.step(batch)
    counts = counts_of(job)[0]
    light = [name for name in counts if name not in COMPUTED]
    return {
        "instructions": sum(counts.values()),
        "bytecodes_an_instruction": found.total() / sum(counts.values()),
        "bytecodes_a_light_instruction": sum(found[name] for name in light) / sum(counts[name] for name in light),
        "bytecodes_by_kind": {name: found[name] / number for name, number in counts.items()},
    }


def begin_kind(kind: list[str], name: str, call: Callable[[Any], None]) -> Callable[[Any], None]:
    """The call, which says of what kind it is."""

    def named_call(run: Any) -> None:
        kind[0] = name
        call(run)

    return named_call


class Kinds(dict[str, list[float]]):
    """Microseconds of instructions, by kind."""

    def add(self, kind: str, ns: int) -> None:
        self.setdefault(kind, []).append(ns / 1e3)

    def all(self, but: Collection[str] = ()) -> list[float]:
        return [us for kind, taken in self.items() if kind not in but for us in taken]

    def means(self) -> dict[str, float]:
        return {kind: statistics.mean(taken) for kind, taken in self.items()}


if __name__ == "__main__":
    main()
