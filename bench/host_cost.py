"""What the host pays for each instruction of a step, beside the launches of kernels themselves.

The op methods of a device runtime are timed by the processor time of the thread that issues them and of autograd's own
threads, so that a busy machine shows little; of a forward or backward, the time of the same stage's module, called
without any runtime, is subtracted. Kernels are to cost nothing: run it under the emulated device (tests/fakecuda) with
FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1. The time of a whole step is that of real plans' instructions: Llama2-7B on one GPU
and 70B on eight, counted by kind.

Run: FAKECUDA_COMPUTE=0 FAKECUDA_NOCOPY=1 fakecuda-run python bench/host_cost.py [--label after]
     python bench/host_cost.py --plans      anew the instructions of both real plans (minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from penstock.runtime.stage.runner import StageRunner

SIZE = GptSize(layers=8, width=64, heads=4, vocabulary=256, length=32)
MICRO_BATCHES, STEPS = 8, 7
FETCHING = PIPELINE.replace("partition-balanced", "partition-balanced{stages=8}")
KEEPING = (
    "drop-masks, coarsen, partition-min-stage, map-round-robin, schedule-pipeline, "
    "choose-activations{swap=true, tier=none, to=dram, share=0.5}, insert-fetch{swap=true}, insert-optimizer"
)
REAL = {  # plan: model, preset, rows, strategy
    "llama2-7b on one rtx4090": ("llama2-7b", "rtx4090x1", 8, "auto"),
    "llama2-70b on eight rtx4090": ("llama2-70b", "rtx4090x8-2rc", 16, "min-stage"),
}
COUNTS = Path(__file__).resolve().parent / "results" / "host_cost_plans.json"
COMPUTED = ("forward", "backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="after", help="which state of the code this is")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", help="this plan alone, such as swapped")
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    if args.plans:
        COUNTS.write_text(json.dumps({name: real_counts(*of) for name, of in REAL.items()}, indent=1) + "\n")
        return
    setup = LittleDram(args.device, small=True, scratch=Path("/nonexistent"))
    batch = batch_of(SIZE, MICRO_BATCHES)
    options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "optimizer": ADAMW}
    jobs: dict[str, Callable[[], penstock.Job]] = {
        "resident": lambda: compiled(setup, gpt(SIZE), batch, stages=4, **options),
        "swapped": lambda: swapped(setup, gpt(SIZE), batch, strategy=FETCHING, **options),
        "swapped, classes kept": lambda: compiled(setup, gpt(SIZE), batch, strategy=KEEPING, **options),
    }
    for plan, make in jobs.items():
        if args.only not in (None, plan):
            continue
        with make() as job:
            found = measure(job, batch)
        emulated = os.environ.get("FAKECUDA_COMPUTE") == "0"
        row = {"plan": plan, "state": args.label, "device": args.device, "kernels_cost_nothing": emulated, **found}
        if plan != "resident" and args.device == "cuda" and COUNTS.exists():  # `--plans` has run
            row["seconds_a_step"] = {name: whole_step(found, counts) for name, counts in real_plans().items()}
        rows.save("host_cost", row)


class LittleDram(Setup):
    """A machine that the plans fit wherever they run."""

    def hardware(self, memory: str | int | None = None) -> penstock.Hardware:
        return super().hardware(memory).with_(dram="2GB")


def real_counts(model: str, preset: str, num_rows: int, strategy: str) -> list[dict[str, int]]:
    """The instructions of each device's step, by kind."""
    named = find_model(model)
    machine = penstock.Hardware.preset(preset, dram="1024GB")
    inputs = named.batch_spec(num_rows, 2048)
    job = penstock.compile(
        named.on_meta(),
        machine,
        example_inputs=inputs,
        precision="bf16-true",
        micro_batches=num_rows,
        strategy=strategy,
    )
    return [dict(Counter(op_of(node).name for node in program.ops())) for program in job.programs]


def real_plans() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(COUNTS.read_text())
    return found


def whole_step(found: Mapping[str, Any], counts: Sequence[Mapping[str, int]]) -> float:
    """The host's seconds for a step of the busiest device, if each kind costs what it cost here; a kind that did not
    occur here costs what the others cost on average, forwards and backwards aside."""
    cost, number = found["us_by_kind"], found["instructions_by_kind"]
    light = [kind for kind in cost if kind not in COMPUTED]
    usual = sum(cost[kind] * number[kind] for kind in light) / sum(number[kind] for kind in light)
    after = found["us_after_the_last_per_instruction"]
    steps = [sum(n * (cost.get(kind, usual) + after) for kind, n in device.items()) for device in counts]
    return max(steps) / 1e6


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


class Timed:
    """Stands between a file's function and its runtime. `taken`: per instruction its kind, stage and nanoseconds."""

    def __init__(self, runtime: Any, clock: Clock):
        self._runtime, self._clock, self._least_ns = runtime, clock, clock.least_ns()
        self.taken: list[tuple[str, str, int]] = []

    def __getattr__(self, name: str) -> Any:
        method, clock, taken, least_ns = getattr(self._runtime, name), self._clock, self.taken, self._least_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock.now_ns()
            result = method(*args, **kwargs)
            stage = args[0] if args and isinstance(args[0], str) else ""
            taken.append((name, stage, clock.now_ns() - start_ns - least_ns))
            return result

        setattr(self, name, timed)
        return timed


def measure(job: penstock.Job, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Medians over steps of each instruction, net; their mean by kind."""
    for _ in range(3):
        job.step(batch)
    session: Any = job.driver.session  # type: ignore[attr-defined]
    clock, function, fed = Clock(), session.file.functions["step"], {}
    whole_ns, plain_ns, runs = [], [], []

    def step(runtime: Any, given: Any) -> Any:
        fed.update(given)
        timed = Timed(runtime, clock)
        runs.append(timed.taken)
        return function(timed, given)

    session.file.functions["step"] = step
    job.step(batch)
    runs.clear()
    for _ in range(STEPS):  # in turns, as the machine is busy at times
        session.file.functions["step"] = step
        whole_ns.append(clock.span_ns(lambda: session.step(fed)))
        session.file.functions["step"] = function
        plain_ns.append(clock.span_ns(lambda: session.step(fed)))
    on_gpu = session.device.type == "cuda"  # a CPU device's launches are another thread's
    direct = (
        {stage: launches_ns(store.runner, clock) for stage, store in session.state.stores.items()} if on_gpu else {}
    )
    net: dict[str, list[float]] = {}
    gross: dict[str, list[float]] = {}
    for row, node in zip(zip(*runs, strict=True), job.programs[0].ops(), strict=True):
        kind, stage, _ = row[0]
        taken_ns = statistics.median(ns for _, _, ns in row)
        gross.setdefault(kind, []).append(taken_ns / 1e3)
        if kind in COMPUTED and on_gpu:
            taken_ns -= sum(direct[stage][part] for part in launched(node))
        net.setdefault(kind, []).append(taken_ns / 1e3)
    after_ns = statistics.median(whole_ns) - statistics.median(sum(ns for _, _, ns in run) for run in runs)
    every = [us for taken in net.values() for us in taken]
    light = [us for kind, taken in net.items() if kind not in COMPUTED for us in taken]
    return {
        "instructions": len(every),
        "us_an_instruction": statistics.mean(every),
        "us_a_light_instruction": statistics.mean(light),
        "us_by_kind": {kind: statistics.mean(taken) for kind, taken in net.items()},
        "us_with_launches_by_kind": {kind: statistics.mean(taken) for kind, taken in gross.items()},
        "instructions_by_kind": {kind: len(taken) for kind, taken in net.items()},
        "ms_a_step_with_launches": statistics.median(plain_ns) / 1e6,
        "us_after_the_last_per_instruction": max(after_ns / 1e3 / len(every), 0.0),
    }


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
    return {part: statistics.median(row) for part, row in taken.items()}


def shapes(runner: StageRunner) -> dict[str, Tensor]:
    return {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in runner.spec.params}


if __name__ == "__main__":
    main()
