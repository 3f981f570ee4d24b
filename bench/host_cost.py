"""What the host pays for each instruction of a step, beside the calls of torch that launch kernels.

The op methods of a device runtime are timed by the processor time of the thread that issues them and of autograd's own
threads, so that a busy machine shows little. What torch itself takes within them (the stage's module, the engine's
backward, copies, the optimizer's step) is timed in the same run and subtracted. Where hooks or modes are on in the
module, forwards and backwards are also compared with the same module, called without any runtime. Kernels are to cost
nothing: run it under the emulated device (tests/fakecuda) with FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1.

Real plans: Llama2-7B on one GPU is issued in full, as the same program of a model of 32 narrow layers,
as the host's cost does not depend on widths; for 70B on eight GPUs, the instructions of each device are counted and
take what each kind took in 7B's.

Run: FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py [--label after] [--only swapped]
     FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py --plans      whole steps of both
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.gpt import GptSize, batch_of, gpt
from penstock.bench.peers.gpu_sections import ADAMW, Setup, compiled, swapped
from penstock.compiler.models.named import find_model
from penstock.compiler.strategies import PIPELINE
from penstock.ir import ops
from penstock.ir.calls import op_of
from penstock.runtime.stage import runner as stage_runner
from penstock.runtime.stage.runner import StageRunner
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
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", help="this plan alone, such as swapped")
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    setup = LittleDram(args.device, small=True, scratch=Path("/nonexistent"))
    about = {"state": args.label, "device": args.device, "kernels_cost_nothing": emulated()}
    if args.plans:
        for row in whole_steps(setup):
            rows.save("host_cost", about | row)
        return
    batch = batch_of(SIZE, MICRO_BATCHES)
    options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "optimizer": ADAMW}
    jobs: dict[str, Callable[[], penstock.Job]] = {
        "resident": lambda: compiled(setup, gpt(SIZE), batch, stages=4, **options),
        "swapped": lambda: swapped(setup, gpt(SIZE), batch, strategy=FETCHING, **options),
        "swapped, classes kept": lambda: compiled(setup, gpt(SIZE), batch, strategy=KEEPING, **options),
        "resident, pointwise again": lambda: compiled(setup, gpt(SIZE), batch, strategy=AGAIN, **options),
    }
    for plan, make in jobs.items():
        if args.only in (None, plan):
            with make() as job:
                rows.save("host_cost", {"plan": plan, **about, **measure(job, batch)})


def emulated() -> bool:
    return os.environ.get("FAKECUDA_COMPUTE") == "0"


class LittleDram(Setup):
    """A machine that the plans fit wherever they run."""

    def hardware(self, memory: str | int | None = None) -> penstock.Hardware:
        return super().hardware(memory).with_(dram="2GB")


# --- whole steps of real plans


def whole_steps(setup: Setup) -> Iterator[dict[str, Any]]:
    """The host's seconds for a step of 7B on one GPU, issued, and of 70B on eight, by kinds."""
    model, _, num_rows = REAL_7B
    wanted = counts_of(real(*REAL_7B))[0]
    narrow = find_model(f"{model}:{NARROW}")
    batch = narrow.random_batch(num_rows, FEW_TOKENS)
    options: dict[str, Any] = {"precision": "bf16-true", "micro_batches": num_rows, "optimizer": ADAMW}
    with swapped(setup, narrow.in_memory(), batch, strategy=REAL_STRATEGY, **options) as job:
        counts = counts_of(job)[0]
        found = measure(job, batch, plain=False)  # beside a filled card there is no room for that
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
    after = found["us_after_the_last_per_instruction"]
    return sum(n * (cost.get(kind, usual) + after) for kind, n in counts.items())


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
        """What it finds between two readings."""
        return min(-self.now_ns() + self.now_ns() for _ in range(1000))

    def span_ns(self, run: Callable[[], Any]) -> int:
        start_ns = self.now_ns()
        run()
        return self.now_ns() - start_ns


class TorchShare:
    """Times the outermost calls of torch that the issuing thread makes. `taken_ns`: so far by "launch" and "event";
    `calls`: their number."""

    def __init__(self, clock: Clock):
        self.clock, self.least_ns, self.taken_ns, self.calls = clock, clock.least_ns(), Counter[str](), 0
        self._inside, self._thread = False, threading.get_ident()
        nothing = self.timed(lambda: None)
        spans = sorted(clock.span_ns(nothing) for _ in range(1000))
        self.around_ns = max(spans[len(spans) // 2] - self.least_ns, 0)  # what timing a call costs outside of it
        self.taken_ns, self.calls = Counter[str](), 0

    def timed(self, call: Callable[..., Any], what: str = "launch") -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            self._inside = True
            start_ns = self.clock.now_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.taken_ns[what] += self.clock.now_ns() - start_ns - self.least_ns
                self.calls += 1
                self._inside = False

        return timed_call

    @contextmanager
    def of(self, stores: Iterable[StageStore]) -> Iterator[None]:
        """Time what the instructions of these stages call."""
        with ExitStack() as patches:
            for name in ("copy_", "to", "pin_memory"):
                call = getattr(Tensor, name)
                patches.enter_context(patch.object(Tensor, name, self.timed(call)))
            for owner, name in ((torch.cuda.Event, "record"), (torch.cuda.Stream, "wait_event")):
                patches.enter_context(patch.object(owner, name, self.timed(getattr(owner, name), "event")))
            engine = stage_runner._engine_run_backward
            patches.enter_context(patch.object(stage_runner, "_engine_run_backward", self.timed(engine)))
            for store in stores:
                patches.enter_context(patch.object(store.runner, "module", self.timed(store.runner.module)))
                if store.optimizer is not None and store.optimizer.optimizer is not None:
                    optimizer = store.optimizer.optimizer
                    patches.enter_context(patch.object(optimizer, "step", self.timed(optimizer.step)))
            yield


class Timed:
    """Stands between a file's function and its runtime. `taken`: per instruction its kind, stage, nanoseconds, and
    those of them that torch took for launches and for events."""

    def __init__(self, runtime: Any, clock: Clock, share: TorchShare):
        self._runtime, self._clock, self._least_ns, self._share = runtime, clock, clock.least_ns(), share
        self.taken: list[tuple[str, str, int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        method, clock, taken, least_ns = getattr(self._runtime, name), self._clock, self.taken, self._least_ns
        share = self._share

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, calls, start_ns = share.taken_ns.copy(), share.calls, clock.now_ns()
            result = method(*args, **kwargs)
            whole_ns = clock.now_ns() - start_ns - least_ns - (share.calls - calls) * share.around_ns
            stage = args[0] if args and isinstance(args[0], str) else ""
            of_torch = share.taken_ns - before
            taken.append((name, stage, whole_ns, of_torch["launch"], of_torch["event"]))
            return result

        setattr(self, name, timed)
        return timed


def measure(job: penstock.Job, batch: Mapping[str, Tensor], plain: bool = True) -> dict[str, Any]:
    """The least over steps of each instruction, net, as all else is the machine's other work; their mean by kind.
    `plain`: compare with modules without a runtime."""
    for _ in range(3):
        job.step(batch)
    session: Any = job.driver.session  # type: ignore[attr-defined]
    clock, function, fed = Clock(), session.file.functions["step"], {}
    share = TorchShare(clock)
    whole_ns, plain_ns, runs = [], [], []

    def step(runtime: Any, given: Any) -> Any:
        fed.update(given)
        timed = Timed(runtime, clock, share)
        runs.append(timed.taken)
        return function(timed, given)

    session.file.functions["step"] = step
    job.step(batch)
    runs.clear()
    for _ in range(STEPS):  # in turns, as the machine is busy at times
        session.file.functions["step"] = step
        with share.of(session.state.stores.values()):
            whole_ns.append(clock.span_ns(lambda: session.step(fed)))
        session.file.functions["step"] = function
        plain_ns.append(clock.span_ns(lambda: session.step(fed)))
    plain &= session.device.type == "cuda"  # a CPU device's launches are another thread's
    stores = session.state.stores.items() if plain else ()
    direct = {stage: launches_ns(store.runner, clock) for stage, store in stores}
    net, gross, beyond, events = Kinds(), Kinds(), Kinds(), Kinds()
    for row, node in zip(zip(*runs, strict=True), job.programs[0].ops(), strict=True):
        kind, stage, *_ = row[0]
        whole = min(ns for _, _, ns, _, _ in row) / 1e3
        gross.add(kind, whole)
        net.add(kind, min(ns - launch_ns for _, _, ns, launch_ns, _ in row) / 1e3)
        events.add(kind, min(event_ns for *_, event_ns in row) / 1e3)
        if kind in COMPUTED and plain:
            beyond.add(kind, whole - sum(direct[stage][part] for part in launched(node)) / 1e3)
    after_ns = min(whole - sum(ns for _, _, ns, _, _ in run) for whole, run in zip(whole_ns, runs, strict=True))
    timing_ns = share.around_ns * share.calls / STEPS
    return {
        "instructions": len(net.all()),
        "us_an_instruction": statistics.mean(net.all()),
        "us_a_light_instruction": statistics.mean(net.all(but=COMPUTED)),
        "us_by_kind": net.means(),
        "us_of_that_for_events_by_kind": events.means(),
        "us_of_that_for_events": statistics.mean(events.all()),
        "us_with_launches_by_kind": gross.means(),
        **({"us_beyond_a_plain_module_by_kind": beyond.means()} if plain else {}),
        "instructions_by_kind": {kind: len(taken) for kind, taken in net.items()},
        "ms_a_step": (sum(net.all()) + max(after_ns - timing_ns, 0.0) / 1e3) / 1e3,
        "ms_a_step_with_launches": min(plain_ns) / 1e6,
        "us_after_the_last_per_instruction": max((after_ns - timing_ns) / 1e3 / len(net.all()), 0.0),
    }


class Kinds(dict[str, list[float]]):
    """Microseconds of instructions, by kind."""

    def add(self, kind: str, us: float) -> None:
        self.setdefault(kind, []).append(us)

    def all(self, but: Collection[str] = ()) -> list[float]:
        return [us for kind, taken in self.items() if kind not in but for us in taken]

    def means(self) -> dict[str, float]:
        return {kind: statistics.mean(taken) for kind, taken in self.items()}


def launched(node: fx.Node) -> tuple[str, ...]:
    """What a forward or a backward launches: parts of `launches_ns`."""
    if node.target is ops.forward:
        return ("forward with a graph",) if node.kwargs.get("keep", True) is True else ("forward",)
    kept = node.args[2]
    is_whole = isinstance(kept, fx.Node) and not kept.meta["type"].classes
    return ("backward",) if is_whole else ("forward with a graph", "backward")


def launches_ns(runner: StageRunner, clock: Clock) -> dict[str, float]:
    """What the launches of one stage's module take."""
    runner.bind({name: torch.zeros(p.shape, dtype=p.dtype, device=runner.device) for name, p in shapes(runner).items()})
    inputs = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=runner.device) for t in runner.spec.inputs]
    for given, want in zip(inputs, runner.spec.inputs):
        given.requires_grad_(want.requires_grad)
    taken: dict[str, list[int]] = {"forward with a graph": [], "backward": [], "forward": []}
    graphs: list[Sequence[Tensor]] = []
    with torch.cuda.stream(torch.cuda.Stream(runner.device)):
        for _ in range(3):  # as in a step: all forwards, then all backwards, in which gradients add up
            for _ in range(MICRO_BATCHES):
                taken["forward with a graph"].append(clock.span_ns(lambda: graphs.append(runner.module(*inputs))))
                with torch.no_grad():
                    taken["forward"].append(clock.span_ns(lambda: runner.module(*inputs)))
            while graphs:
                roots = [out for out in graphs.pop() if out.requires_grad]
                ones = [torch.ones_like(root) for root in roots]
                taken["backward"].append(clock.span_ns(lambda: torch.autograd.backward(roots, ones)))  # noqa: B023
    for tensor in (*inputs, *runner.parameters.values()):
        tensor.grad = None
    return {part: min(row) for part, row in taken.items()}


def shapes(runner: StageRunner) -> dict[str, Tensor]:
    return {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in runner.spec.params}


if __name__ == "__main__":
    main()
