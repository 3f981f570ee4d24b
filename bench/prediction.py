"""Predictions of plans against measurements: step time after measuring this machine, peak memory of every tier.

Peaks are compared with those that the runtime accounts for, op by op, in the second step.

Run: python bench/prediction.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import partial

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import whole_step

STEP_TARGET, PEAK_TARGET = 0.20, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--models", nargs="*", choices=list(models.MODELS), default=list(models.MODELS))
    args = parser.parse_args()
    begin_s = time.perf_counter()
    here = penstock.Hardware.detect(measure=True)
    print(f"measured this machine in {time.perf_counter() - begin_s:.0f} s")
    for name in args.models:
        for what, machine, options in cases(here):
            compare(name, what, machine, options, args.rounds)


def cases(here: penstock.Hardware) -> Iterator[tuple[str, penstock.Hardware, dict[str, object]]]:
    """The cases to plan: a name, a part of this machine, and options."""
    one = here.with_(num_devices=1)
    yield "one device", one, {"micro_batches": 4}
    yield "one device, weights swapped", one.with_(memory="80MB"), {"micro_batches": 4}
    if os.cpu_count() > 1 and here.num_devices > 1:
        yield "two devices, gpipe", here.with_(num_devices=2), {"strategy": "gpipe", "micro_batches": 4}
        yield "two devices, own choice", here.with_(num_devices=2), {}
        yield "two devices, weights swapped", here.with_(num_devices=2, memory="60MB"), {"micro_batches": 4}


def compare(name: str, what: str, machine: penstock.Hardware, options: dict[str, object], rounds: int) -> None:
    """Save one row with a plan's figures, predicted and measured."""
    batch, times_s = models.batch(), []
    job = penstock.compile(
        models.MODELS[name](), machine, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=1e-4), **options
    )
    with job:
        for number in range(-2, rounds):
            begin_s = time.perf_counter()
            whole_step(job, batch)
            if number >= 0:
                times_s.append(time.perf_counter() - begin_s)
        accounted = dict(job.last.peak_bytes)
    plan = job.plan
    predicted, found = plan.predicted, rows.spread(times_s)
    rows.save(
        "prediction",
        {
            "model": name, "case": what, "micro_batches": plan.micro_batches, "stages": len(plan.decisions.stages),
            "predicted_s": predicted.step_s, "measured": found,
            "step_error": predicted.step_s / found["median_s"] - 1,
            "step_error_of_fastest": predicted.step_s / found["min_s"] - 1, "step_target": STEP_TARGET,
            "predicted_peak_bytes": predicted.peak_bytes, "accounted_peak_bytes": accounted,
            "peak_error": max(
                abs(predicted.peak_bytes[memory] / peak - 1) for memory, peak in accounted.items() if peak
            ),
            "peak_target": PEAK_TARGET,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
