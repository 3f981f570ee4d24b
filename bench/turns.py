"""Turns on links: a step whose fetches of weights share a root complex evenly, and one in which those needed first come
first (`take-turns`), of the same stages on the same devices.

Run: python bench/turns.py [--only rehearsed|run|hand_over] [--runs 2] [--steps 8] [--machines mobius-topo4 ...]

- rehearsed: models of Mobius's table 3 on the machines of its paper, micro-batch 1, weights swapped. Both plans are
  simulated, and rehearsed in the processes, threads and messages of a run, with timed waits on emulated links;
  rehearsals alternate, the fastest of each side counts. `taken`: what `take-turns` decides there by itself.
- run: four CPU devices of this machine with links held down to `LINK`, a linear layer on each, trained for
  real. Steps alternate between the two jobs, from rest; times are medians. Blocks are timed first (`profile`), so that
  the simulated step is of this machine. `ranks`: the job with turns once more under torchrun, where chunks are copied
  one by one as on a GPU, each when its rank has the link. Losses of all are equal.
- hand_over: the seconds from the end of a chunk on one process to the grant of the link to another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.runtime.device.pacing import CHUNK_S, HAND_OVER_S
from penstock.runtime.processes.local import worker_environment
from penstock.runtime.turns import TurnClient, TurnServer

SWAPPED = "schedule-pipeline, insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer"
CUT = "partition-balanced{stages=2*devices}"
TURNS = "take-turns{always=true}"
CASES = [
    ("mobius-topo4", "mobius-3b", "map-cross"), ("mobius-topo4", "mobius-8b", "map-cross"),
    ("mobius-topo4", "mobius-15b", "map-cross"), ("mobius-topo2+2", "mobius-15b", "map-cross"),
    ("mobius-topo2+2", "mobius-15b", "map-sequential"), ("mobius-topo1+3", "mobius-15b", "map-cross"),
    ("mobius-topo4+4", "mobius-15b", "map-cross"),
]  # fmt: skip
SEQUENCE = 512
DEVICES, LAYERS, WIDTH, ROWS, LINK = 4, 4, 1024, 2048, "40MB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["rehearsed", "run", "hand_over"])
    parser.add_argument("--runs", type=int, default=2, help="rehearsals of each side (default 2)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each job (default 8)")
    parser.add_argument("--machines", nargs="*")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        as_rank(args.as_rank, args.steps)
        return
    if args.only in (None, "hand_over"):
        hand_over()
    if args.only in (None, "run"):
        run(args.steps)
    for case in CASES if args.only in (None, "rehearsed") else ():
        if args.machines is None or case[0] in args.machines:
            rehearse(*case, args.runs)


# --- rehearsed


def rehearse(machine: str, name: str, mapping: str, runs: int) -> None:
    """Save one row of two plans."""
    model, count = find_model(name), penstock.Hardware.preset(machine).num_devices
    jobs = {}
    for side, last in (("fair", ""), ("turns", f", {TURNS}"), ("decided", ", take-turns")):
        jobs[side] = penstock.compile(
            model.on_meta(), machine, example_inputs=model.batch_spec(count, SEQUENCE), micro_batches=count,
            precision="fp16", strategy=f"drop-masks, coarsen, {CUT}, {mapping}, {SWAPPED}{last}",
        )  # fmt: skip
    taken = jobs.pop("decided").plan.decisions.link_turns
    found: dict[str, list[float]] = {side: [] for side in jobs}
    for _ in range(runs):
        for side, job in jobs.items():
            found[side].append(job.rehearse().step_s)
    simulated_s = {side: job.simulate().from_rest_s for side, job in jobs.items()}
    rehearsed_s = {side: min(times_s) for side, times_s in found.items()}
    row = {
        "figure": "rehearsed", "machine_described": machine, "model": name, "mapping": mapping, "micro_batches": count,
        "stages": len(jobs["turns"].plan.decisions.stages), "simulated_s": simulated_s, "rehearsed_s": rehearsed_s,
        "all_rehearsed_s": found, "simulated_ratio": ratio(simulated_s), "rehearsed_ratio": ratio(rehearsed_s),
        "taken": taken,
    }  # fmt: skip
    rows.save("turns", row)


def ratio(seconds: dict[str, Any]) -> float:
    """A step in turns over one in fair shares."""
    return float(seconds["turns"] / seconds["fair"])


# --- run


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def job_of(last: str, **options: Any) -> penstock.Job:
    torch.manual_seed(0)
    hardware = penstock.Hardware.cpu(DEVICES, memory="200MB", h2d=LINK, d2h="10GB/s", link="1GB/s")
    hardware = hardware.with_(root_complex_bandwidth=LINK)
    return penstock.compile(
        Layers(), hardware, example_inputs={"x": batch_of(0)}, micro_batches=1,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        strategy=f"coarsen, partition-balanced{{stages={LAYERS}}}, map-round-robin, {SWAPPED}{last}", **options,
    )  # fmt: skip


def batch_of(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def one_step(job: penstock.Job, step: int) -> tuple[float, float]:
    """The loss, and the seconds of a step from rest to its end."""
    begin_s = time.perf_counter()
    loss = job.step({"x": batch_of(step)}).item()
    assert job.last is not None  # waits for its end
    return loss, time.perf_counter() - begin_s


def run(steps: int) -> None:
    """Save one row of two jobs, trained in turns, and of one under torchrun."""
    jobs = {"fair": job_of("", profile=True), "turns": job_of(f", {TURNS}", profile=True)}
    simulated_s = {side: job.simulate().from_rest_s for side, job in jobs.items()}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in jobs}
    for step in range(steps):
        for side, job in jobs.items():
            found[side].append(one_step(job, step))
    for job in jobs.values():
        job.close()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}"]
        command += [__file__, "--as-rank", folder, "--steps", str(steps)]
        subprocess.run(command, check=True, env=worker_environment(1))
        found["ranks"] = json.loads(Path(folder, "rank0.json").read_text())
    losses = {side: [loss for loss, _ in rows_] for side, rows_ in found.items()}
    measured_s = {side: statistics.median([took_s for _, took_s in rows_[1:]]) for side, rows_ in found.items()}
    pairs = [b[1] / a[1] for a, b in zip(found["fair"][1:], found["turns"][1:], strict=True)]
    row = {
        "figure": "run", "model": f"{LAYERS} linear layers of {WIDTH}", "rows": ROWS, "link": LINK, "steps": steps,
        "simulated_s": simulated_s, "step_s": measured_s, "simulated_ratio": ratio(simulated_s),
        "ratio": ratio(measured_s), "ratio_of_pairs": statistics.median(pairs),
        "losses_equal": losses["fair"] == losses["turns"] == losses["ranks"],
    }  # fmt: skip
    rows.save("turns", row)


def as_rank(folder: Path, steps: int) -> None:
    job = job_of(f", {TURNS}")
    found = [one_step(job, step) for step in range(steps)]
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    job.close()


# --- hand over


def hold_in_turns(address: str, count: int, results: Any) -> None:
    client, spans = TurnClient(address, 0), []
    for _ in range(count):
        with client.hold(0):
            begin_s = time.monotonic()
            time.sleep(CHUNK_S)
            spans.append((begin_s, time.monotonic()))
    results.put(spans)


def hand_over(processes: int = 2, count: int = 200) -> None:
    """Save one row."""
    with tempfile.TemporaryDirectory() as folder:
        server, context = TurnServer(str(Path(folder, "turns"))), multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        given = (server.address, count, results)
        asking = [context.Process(target=hold_in_turns, args=given) for _ in range(processes)]
        for process in asking:
            process.start()
        spans = [(*span, number) for number in range(processes) for span in results.get(timeout=100)]
        for process in asking:
            process.join()
        server.close()
    spans.sort()
    gaps_s = [after[0] - before[1] for before, after in itertools.pairwise(spans) if before[2] != after[2]]
    quantiles_s = statistics.quantiles(gaps_s, n=4)
    row = {
        "figure": "hand_over", "processes": processes, "chunks": len(spans), "chunk_s": CHUNK_S,
        "covered_s": HAND_OVER_S, "hand_over_s": dict(zip(("lower quartile", "median", "upper quartile"), quantiles_s)),
    }  # fmt: skip
    rows.save("turns", row)


if __name__ == "__main__":
    main()
