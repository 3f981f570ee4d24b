"""A model whose states are four times the DRAM given to it, trained from files on a disk: against what bounds it,
against itself without overlap, and against what people use. For a machine without a GPU.

Step: beside the job run, turn by turn and with the same threads: eager PyTorch with everything in RAM (its computation
and its optimizer are two parts of the bound, its losses the right ones), and the same bytes of disk traffic through the
same files with nothing else going on, once reads after writes and once both at once; the faster is the third part.
The bound is the longest part, if the machine has a core that computation leaves to the optimizer; else both share cores
and their sum counts. `ratio_recomputing` is against the same bound with every block computed twice.

Peers: ZeRO-Infinity with weights and states in files (`--deepspeed-python`, a Python that has it), a loop written by
hand, FSDP2 with CPU offload (which has no disk tier: all in RAM).

Run: python bench/reservoir.py [--deepspeed-python PYTHON] [--directory DIR] [--rounds N] [--section NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.bench.peers import footprint, models, rows
from penstock.bench.peers.bound import Bound, Disk, EagerParts
from penstock.bench.peers.children import CALM, Child
from penstock.bench.peers.offload_loop import OffloadLoop
from penstock.bench.peers.timing import alternate, whole_step
from penstock.compiler.strategies import STRATEGIES
from penstock.errors import DoesNotFit, PenstockError
from penstock.runtime.measure.disks import disk_rates

STEP_TARGET, MEMORY_TARGET, SIMULATOR_TARGET = 1.15, 0.10, 0.20
STATES_OVER_DRAM = 4
WITHOUT_OVERLAP = 3  # times the DRAM; see `Bench.hardware`
STATE_BYTES = 12  # per parameter: fp32 weights and AdamW's two moments
LR, THREADS = 1e-4, 1
PEERS = Path(__file__).resolve().parent / "peers"
FUYOU = STRATEGIES["fuyou"]
APART = FUYOU.replace("overlap-optimizer", "overlap-optimizer{overlap=false}")


@dataclass(frozen=True)
class Case:
    """A GPT-2, a global batch of sequences of 128, and a device's memory. `dram_bytes` is a quarter of the states."""

    name: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    micro_batches: int
    memory: str
    tied: bool = True
    lr: float = LR

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())

    @property
    def dram_bytes(self) -> int:
        return STATE_BYTES * self.parameters // STATES_OVER_DRAM

    def model(self) -> Any:
        return models.gpt2(self.layers, self.width, self.tied, self.vocabulary)

    def inputs(self) -> dict[str, torch.Tensor]:
        return models.batch(self.batch, vocabulary=self.vocabulary)

    def facts(self) -> dict[str, Any]:
        return {
            "case": self.name, "model": f"gpt2 {self.layers} x {self.width}, vocabulary {self.vocabulary}, fp32",
            "batch": f"{self.batch} x 128", "micro_batches": self.micro_batches, "parameters": self.parameters,
            "state_bytes": STATE_BYTES * self.parameters, "dram_bytes": self.dram_bytes, "memory": self.memory,
        }  # fmt: skip


CASES = (
    Case("bound by computation", 16, 512, 2048, batch=3, micro_batches=3, memory="600MB"),
    Case("bound by the disk", 16, 512, 2048, batch=1, micro_batches=1, memory="300MB"),
)
HELD_READ, HELD_WRITE = 1.5e9, 1e9
SMALL = (Case("small", 24, 64, 64, batch=4, micro_batches=2, memory="16MB"),)


@dataclass
class Bench:
    """The directory and machine of all sections. `disk` is the directory for files, `machine` this machine with rates
    measured now."""

    cases: tuple[Case, ...]
    machine: penstock.Hardware
    disk: Path
    rounds: int
    deepspeed: Path | None
    out: Path | None

    def hardware(self, case: Case, strategy: str = "fuyou") -> penstock.Hardware:
        """The machine with the case's memory and DRAM. A plan without overlap gets more DRAM, as all gradients (a third
        of the states' bytes) wait there for the end of the backward pass."""
        dram_bytes = case.dram_bytes * (WITHOUT_OVERLAP if strategy == APART else 1)
        return self.machine.with_(memory=case.memory, dram=dram_bytes)

    def compile(self, case: Case, strategy: str) -> penstock.Job:
        return penstock.compile(
            case.model(), self.hardware(case, strategy), ssd_dirs=[str(self.disk)], example_inputs=case.inputs(),
            optimizer=partial(torch.optim.AdamW, lr=LR), strategy=strategy, micro_batches=case.micro_batches,
        )  # fmt: skip

    def save(self, figure: str, row: dict[str, Any]) -> None:
        rows.save("reservoir", {"figure": figure, **row}, self.out)


class Runner:
    """One side of a comparison, which runs steps and keeps their losses."""

    def __init__(self, step: Callable[[], Any]):
        self.run, self.losses = step, []

    def __call__(self) -> None:
        self.losses.append(float(self.run()))


# -- a step against its bound, and against the peers ------------------------------------------------------------------


def measure_steps(bench: Bench, case: Case) -> None:
    """Run all sides of one case, turn by turn; save one row for the bound and the overlap, and one per peer."""
    with ExitStack() as stack:
        compare(bench, case, stack)


def compare(bench: Bench, case: Case, stack: ExitStack) -> None:
    batch = case.inputs()
    overlapped = stack.enter_context(bench.compile(case, "fuyou"))
    apart = stack.enter_context(bench.compile(case, APART))
    ours = Runner(lambda: whole_step(overlapped, batch))
    ours()
    moved = disk_bytes(overlapped.last.moved_bytes)
    disk = stack.enter_context(Disk(bench.disk, moved["read"], moved["write"]))
    eager = EagerParts(case.model(), case.micro_batches, LR)
    twice = EagerParts(case.model(), case.micro_batches, LR)
    twice.model.gradient_checkpointing_enable({"use_reentrant": False})
    sides: dict[str, Callable[[], object]] = {
        "penstock": ours, "penstock, no overlap": Runner(lambda: whole_step(apart, batch)),
        "eager": Runner(lambda: eager.step(batch)), "eager, recomputing": Runner(lambda: twice.step(batch)),
        "disk in turn": disk.read_then_write, "disk at once": disk.read_while_writing,
    }  # fmt: skip
    peers, skipped = start_peers(bench, case, stack)
    sides |= {name: Runner(peer.step) for name, peer in peers.items()}
    times_s = alternate(sides, bench.rounds, warm_up=1)
    eager.compute_s, eager.optimizer_s = eager.compute_s[1:], eager.optimizer_s[1:]
    losses = {name: side.losses for name, side in sides.items() if isinstance(side, Runner)}
    bound_row(bench, case, overlapped, times_s, eager, twice, disk, moved, losses)
    peer_rows(bench, case, times_s, peers, losses)
    for name, reason in skipped.items():
        bench.save("peer", {**case.facts(), "peer": name, "skipped": reason})


def bound_row(
    bench: Bench, case: Case, job: penstock.Job, times_s: dict[str, list[float]], eager: EagerParts, twice: EagerParts,
    disk: Disk, moved: dict[str, int], losses: dict[str, list[float]],
) -> None:  # fmt: skip
    sides = ("penstock", "penstock, no overlap")
    step_s, disk_s = times_s["penstock"], min(times_s["disk in turn"], times_s["disk at once"], key=statistics.median)
    shared = len(os.sched_getaffinity(0)) < THREADS + 1
    median = statistics.median
    bound = Bound(median(eager.compute_s), median(eager.optimizer_s), median(disk_s), shared)
    recomputing = replace(bound, compute_s=median(twice.compute_s[1:]))
    added_up = replace(bound, cores_shared=True)
    by_round = zip(step_s, eager.compute_s, eager.optimizer_s, disk_s)
    pairs = [step / Bound(*parts, shared).seconds for step, *parts in by_round]
    bench.save(
        "step",
        {
            **case.facts(), "threads": THREADS, "plan": summary(job), "step": rows.spread(step_s),
            "no_overlap": rows.spread(times_s["penstock, no overlap"]),
            "no_overlap_dram_bytes": WITHOUT_OVERLAP * case.dram_bytes,
            "gain_of_overlap": median(times_s["penstock, no overlap"]) / median(step_s),
            "compute": rows.spread(eager.compute_s), "compute_recomputing": rows.spread(twice.compute_s[1:]),
            "optimizer": rows.spread(eager.optimizer_s), "disk": rows.spread(disk_s),
            "disk_in_turn_s": median(times_s["disk in turn"]), "disk_at_once_s": median(times_s["disk at once"]),
            "disk_bytes": moved, "disk_read_s": median(disk.read_s), "disk_write_s": median(disk.write_s),
            "disk_engine": disk.folder.engine,
            "bound_s": bound.seconds, "bound_by": bound.longest_part, "cores_shared": shared,
            "ratio": median(step_s) / bound.seconds, "ratio_of_fastest": min(step_s) / bound.seconds,
            "ratio_of_pairs": median(pairs), "target": STEP_TARGET,
            "ratio_recomputing": median(step_s) / recomputing.seconds,
            "ratio_if_cores_were_shared": median(step_s) / added_up.seconds,
            "predicted_s": job.plan.predicted.step_s,
            "losses_differ_by": max(loss_difference(losses, name) for name in sides),
        },
    )  # fmt: skip


def loss_difference(losses: dict[str, list[float]], side: str) -> float:
    """The largest relative difference between a loss of this side and eager's loss of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses[side], losses["eager"], strict=False))


def disk_bytes(moved: dict[str, int]) -> dict[str, int]:
    """Bytes read from and written to all disks in one step, from a report's `moved_bytes`."""
    routes = [(route.split(" -> "), n) for route, n in moved.items()]
    return {
        "read": sum(n for (source, _), n in routes if source.startswith("ssd")),
        "write": sum(n for (_, target), n in routes if target.startswith("ssd")),
    }


def summary(job: penstock.Job) -> dict[str, Any]:
    decisions = job.plan.decisions
    return {
        "stages": len(decisions.stages), "rematerialised": len(decisions.rematerialise),
        "predicted_peak_bytes": job.plan.predicted.peak_bytes, "bottleneck": job.plan.predicted.bottleneck,
    }  # fmt: skip


def start_peers(bench: Bench, case: Case, stack: ExitStack) -> tuple[dict[str, Any], dict[str, str]]:
    """The peers that run here, and the reasons why others do not."""
    settings = {**asdict(case), "directory": str(bench.disk), "port": 29600 + os.getpid() % 300, "checkpoint": False}
    loop = OffloadLoop(case.model(), bench.disk, case.micro_batches, LR)
    peers: dict[str, Any] = {"loop by hand": LoopPeer(stack.enter_context(loop), case.inputs())}
    peers["fsdp2, all in RAM"] = stack.enter_context(Child(PEERS / "fsdp_offload.py", settings, THREADS))
    if bench.deepspeed is None:
        return peers, {"zero-infinity": "no --deepspeed-python was given"}
    variants = {
        "zero-infinity": (THREADS, False), "zero-infinity, recomputing": (THREADS, True),
        "zero-infinity, two threads": (2, False),
    }  # fmt: skip
    skipped = {}
    for number, (name, (threads, checkpoint)) in enumerate(variants.items()):
        folder = bench.disk / f"zero{number}"
        folder.mkdir(exist_ok=True)
        mine = {**settings, "directory": str(folder), "port": settings["port"] + number, "checkpoint": checkpoint}
        say(f"starting {name}; its first start ever builds its extensions, which takes minutes")
        try:
            peers[name] = stack.enter_context(zero_infinity(bench.deepspeed, mine, threads))
        except RuntimeError as error:
            skipped[name] = str(error)
    return peers, skipped


def zero_infinity(python: Path, settings: dict[str, Any], threads: int) -> Child:
    environment = {
        "DS_ACCELERATOR": "cpu", "MAX_JOBS": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # ninja is beside its python
        "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch_extensions"),
    }  # fmt: skip
    return Child(PEERS / "zero_infinity.py", settings, threads, str(python), environment)


class LoopPeer:
    def __init__(self, loop: OffloadLoop, batch: dict[str, torch.Tensor]):
        self.loop, self.batch, self.peak_bytes = loop, batch, None

    def step(self) -> float:
        return self.loop.step(self.batch)


def peer_rows(
    bench: Bench, case: Case, times_s: dict[str, list[float]], peers: dict[str, Any], losses: dict[str, list[float]]
) -> None:
    ours = times_s["penstock"]
    for name, peer in peers.items():
        theirs = times_s[name]
        bench.save(
            "peer",
            {
                **case.facts(), "peer": name, "facts": getattr(peer, "facts", {}), "peer_step": rows.spread(theirs),
                "step": rows.spread(ours), "times_faster": statistics.median(theirs) / statistics.median(ours),
                "times_faster_of_fastest": min(theirs) / min(ours), "peer_peak_rss_bytes": peer.peak_bytes,
                "losses_differ_by": loss_difference(losses, name),
            },
        )  # fmt: skip


# -- memory and predictions -------------------------------------------------------------------------------------------


def measure_memory(bench: Bench, case: Case) -> None:
    """Measure the RAM of a training process, see `footprint`."""
    weights = bench.disk / case.name.replace(" ", "-")
    case.model().save_pretrained(weights)
    machine = bench.hardware(case).model_dump(mode="json")
    settings = {**asdict(case), "machine": machine, "weights": str(weights), "directory": str(bench.disk)}
    found = subprocess.run(
        [sys.executable, footprint.__file__, json.dumps({**settings, "strategy": "fuyou", "steps": 3})],
        capture_output=True, text=True, env={**os.environ, **CALM, "OMP_NUM_THREADS": str(THREADS)},
    )  # fmt: skip
    if found.returncode:
        raise RuntimeError(found.stderr.strip().rpartition("\n")[2])
    row = json.loads(found.stdout.splitlines()[-1])
    bench.save("memory", {**case.facts(), **row, "error": row["ratio"] - 1, "target": MEMORY_TARGET})


def measure_predictions(bench: Bench, case: Case) -> None:
    """Compare predicted and measured steps of several plans, on the machine as measured at the start."""
    for name, strategy in plans().items():
        say(f"{case.name}: {name}")
        try:
            job = bench.compile(case, strategy)
        except DoesNotFit as error:
            bench.save("prediction", {**case.facts(), "plan": {"name": name}, "skipped": str(error)})
            continue
        with job:
            times_s = alternate({"job": partial(job.step, case.inputs())}, max(bench.rounds, 3))["job"]
        predicted_s = job.plan.predicted.step_s
        bench.save(
            "prediction",
            {
                **case.facts(), "plan": {"name": name, **summary(job)}, "predicted_s": predicted_s,
                "step": rows.spread(times_s), "error": predicted_s / statistics.median(times_s) - 1,
                "error_of_fastest": predicted_s / min(times_s) - 1, "target": SIMULATOR_TARGET,
            },
        )  # fmt: skip


def plans() -> dict[str, str]:
    """Strategies by name: Fuyou; Fuyou with the optimizer after the backward pass; with all activations recomputed; and
    with activations moved to the disk."""
    chosen = "choose-activations{swap=true, tier=all}"
    moved = FUYOU.replace(chosen, "choose-activations{swap=true, tier=all, to=ssd}")
    return {
        "fuyou": "fuyou", "no overlap": APART, "rematerialised": FUYOU.replace(chosen, "insert-remat{always=true}"),
        "activations to disk": moved,
    }  # fmt: skip


def measure_throttle(bench: Bench, case: Case) -> None:
    """Run on the same files with the disk throttled to rates so slow that its other users do not show; the bound is
    then arithmetic. `no_overlap` has as much DRAM as `step_with_its_dram`."""
    ssd = {"size_bytes": "20GB", "read_bandwidth": HELD_READ, "write_bandwidth": HELD_WRITE}
    held = replace(bench, machine=bench.machine.with_(ssds=[ssd], throttled=True))
    roomy = replace(held, machine=held.machine.with_(dram=WITHOUT_OVERLAP * case.dram_bytes))
    batch, eager = case.inputs(), EagerParts(case.model(), case.micro_batches, LR)
    times_s: dict[str, list[float]] = {}
    with held.compile(case, "fuyou") as job:
        times_s |= alternate({"step": partial(job.step, batch), "eager": partial(eager.step, batch)}, bench.rounds)
        moved, predicted_s = disk_bytes(job.last.moved_bytes), job.plan.predicted.step_s
    for name, strategy in (("step_with_its_dram", "fuyou"), ("no_overlap", APART)):
        with penstock.compile(
            case.model(), roomy.machine.with_(memory=case.memory), ssd_dirs=[str(bench.disk)], example_inputs=batch,
            optimizer=partial(torch.optim.AdamW, lr=LR), strategy=strategy, micro_batches=case.micro_batches,
        ) as other:  # fmt: skip
            times_s |= alternate({name: partial(other.step, batch)}, bench.rounds)
    disk_s = moved["read"] / HELD_READ + moved["write"] / HELD_WRITE
    median = statistics.median
    bound_s = max(disk_s, median(eager.compute_s), median(eager.optimizer_s))
    bench.save(
        "held",
        {
            **case.facts(), "read_bandwidth": HELD_READ, "write_bandwidth": HELD_WRITE, "disk_bytes": moved,
            **{name: rows.spread(found) for name, found in times_s.items()}, "bound_s": bound_s, "disk_s": disk_s,
            "ratio": median(times_s["step"]) / bound_s, "target": STEP_TARGET,
            "gain_of_overlap": median(times_s["no_overlap"]) / median(times_s["step_with_its_dram"]),
            "predicted_s": predicted_s, "error": predicted_s / median(times_s["step"]) - 1,
        },
    )  # fmt: skip


SECTIONS = {
    "steps": measure_steps, "held": measure_throttle, "memory": measure_memory, "predictions": measure_predictions,
}  # fmt: skip


def run(bench: Bench, section: str, case: Case) -> bool:
    """Run one section of one case. Returns whether it succeeded; a failure becomes a row, and the others still run."""
    say(f"{section}: {case.name}")
    try:
        SECTIONS[section](bench, case)
    except (PenstockError, RuntimeError) as error:
        bench.save(section, {**case.facts(), "failed": f"{type(error).__name__}: {error}"})
        return False
    return True


def this_machine(disk: Path) -> penstock.Hardware:
    """One CPU device of this machine with all rates measured, those of the disk through the runtime's own files."""
    say("measuring this machine")
    rates = disk_rates(disk)
    found = penstock.Hardware.detect(measure=True)
    ssd = {
        "size_bytes": "20GB", "read_bandwidth": rates["disk_read"], "write_bandwidth": rates["disk_write"],
        "latency_s": rates["disk_latency_s"],
    }  # fmt: skip
    return found.with_(num_devices=1, threads=THREADS, ssds=[ssd])


def say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", type=Path, help="a Python that has deepspeed; without: not compared")
    parser.add_argument("--directory", help="on the disk to use; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="only this; may be repeated")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the benchmark itself")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/reservoir.jsonl")
    args = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="reservoir-", dir=args.directory) as folder:
        machine = this_machine(Path(folder))
        cases = SMALL if args.small else CASES
        bench = Bench(cases, machine, Path(folder), args.rounds, args.deepspeed_python, args.out)
        failed = [not run(bench, name, case) for name in args.section or SECTIONS for case in bench.cases]
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
