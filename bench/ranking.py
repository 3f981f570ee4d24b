"""Six plans of one GPT-2 on CPU devices of this machine: are they simulated in the order in which they run?

Two and four devices, weights resident or swapped, more and fewer micro-batches, links as they are or held down, one
root complex shared. The machine and the model's blocks are measured first. All plans then run in turns, so that what
else the machine does meets all of them, and the medians are compared.

Run: python bench/ranking.py [--rounds 12] [--no-profile] [--small]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import whole_step

TAU_TARGET, ERROR_TARGET = 0.8, 0.20
WARM_UP = 2
SWAPPED = (
    "coarsen, partition-balanced{stages=%d}, map-round-robin, schedule-pipeline, insert-remat, "
    "insert-fetch{swap=true}, insert-optimizer"
)


@dataclass
class Case:
    """One plan and its times; `options` are those of `penstock.compile`."""

    name: str
    machine: penstock.Hardware
    options: dict[str, Any]
    predicted_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each plan that count (default 12)")
    parser.add_argument("--no-profile", action="store_true", help="times of blocks from the machine's rates alone")
    parser.add_argument("--small", action="store_true", help="a model of two layers, to try this script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = penstock.Hardware.detect(measure=True)
    layers, width, size = (4, 128, 8) if args.small else (8, 256, 8)
    batch = models.batch(size)
    with ExitStack() as running:
        jobs = []
        plans = cases(here, slow_rate(here, layers, width, size))
        for case in plans:
            job = penstock.compile(
                models.gpt2(layers, width), case.machine, example_inputs=batch,
                optimizer=partial(torch.optim.AdamW, lr=1e-4), profile=not args.no_profile, **case.options,
            )  # fmt: skip
            case.predicted_s = job.simulate().from_rest_s
            jobs.append(running.enter_context(job))
        for number in range(-WARM_UP, args.rounds):
            for case, job in zip(plans, jobs, strict=True):
                begin_s = time.perf_counter()
                whole_step(job, batch)
                if number >= 0:
                    case.times_s.append(time.perf_counter() - begin_s)
        stages = [len(job.plan.decisions.stages) for job in jobs]
    report(plans, stages, not args.no_profile)


def slow_rate(here: penstock.Hardware, layers: int, width: int, size: int) -> float:
    """Bytes/s at which moving all weights once takes as long as computing a step on one device would."""
    params = 12 * layers * width**2 + models.VOCABULARY * width
    step_s = 6 * params * size * 128 / here.devices[0].achieved_flops("fp32")
    return 4 * params / step_s


def cases(here: penstock.Hardware, slow: float) -> list[Case]:
    """Plans whose step times differ clearly; a link of `slow` bytes/s slows a step down."""
    two, four = (here.with_(num_devices=n, memory="1GB", dram="4GB") for n in (2, 4))
    messages = [m.with_(throttled=True, nvlink_bandwidth=rate) for m, rate in ((two, slow / 5), (four, slow / 12))]
    weights = two.with_(throttled=True, h2d_bandwidth=slow / 2, d2h_bandwidth=slow / 2)
    shared = four.with_(
        throttled=True, h2d_bandwidth=slow / 2.5, d2h_bandwidth=slow / 2.5, root_complex_bandwidth=slow / 2.5
    )
    return [
        Case("4 devices, resident", four, {"strategy": "gpipe", "micro_batches": 4}),
        Case("2 devices, swapped, 1 micro-batch", two, {"strategy": SWAPPED % 4, "micro_batches": 1}),
        Case("2 devices, resident, slow messages", messages[0], {"strategy": "gpipe", "micro_batches": 4}),
        Case("2 devices, swapped, slow links", weights, {"strategy": SWAPPED % 4, "micro_batches": 4}),
        Case("4 devices, resident, slower messages", messages[1], {"strategy": "gpipe", "micro_batches": 4}),
        Case("4 devices, swapped, one slow root complex", shared, {"strategy": SWAPPED % 8, "micro_batches": 4}),
    ]


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """The number of pairs in the same order less that of pairs in opposite order, as a share of all pairs."""
    pairs = list(itertools.combinations(range(len(left)), 2))
    agree = sum(((left[i] - left[j]) * (right[i] - right[j]) > 0) for i, j in pairs)
    differ = sum(((left[i] - left[j]) * (right[i] - right[j]) < 0) for i, j in pairs)
    return (agree - differ) / len(pairs)


def report(plans: Sequence[Case], stages: Sequence[int], profiled: bool) -> None:
    """Print the table; save a row per plan and one for all plans."""
    tau = kendall_tau([case.predicted_s for case in plans], [case.measured_s for case in plans])
    print(f"{'plan':55}{'simulated':>10}{'median':>10}{'fastest':>10}{'error':>8}")
    for case, count in sorted(zip(plans, stages), key=lambda pair: pair[0].measured_s):
        fastest_s = min(case.times_s)
        print(f"{case.name:55}{case.predicted_s:10.3f}{case.measured_s:10.3f}{fastest_s:10.3f}{case.error:8.0%}")
        rows.save(
            "ranking",
            {
                "case": case.name, "strategy": case.options["strategy"], "stages": count, "profiled": profiled,
                "micro_batches": case.options["micro_batches"], "predicted_s": case.predicted_s,
                "measured": rows.spread(case.times_s), "error": case.error, "target": ERROR_TARGET,
            },
        )  # fmt: skip
    worst = max((case.error for case in plans), key=abs)
    rows.save(
        "ranking",
        {
            "case": "all", "profiled": profiled, "kendall_tau": tau, "tau_target": TAU_TARGET, "largest_error": worst,
            "target": ERROR_TARGET, "met": tau >= TAU_TARGET and abs(worst) <= ERROR_TARGET,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
