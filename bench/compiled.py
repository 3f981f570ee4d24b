"""A step whose blocks `torch.compile` runs against the same plan's step as written, on one CPU device, in turns.

Run: python bench/compiled.py [--model gpt2|llama|t5|bert] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import alternate, whole_step

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = models.batch()
    jobs = {name: compile_job(args.model, batch, name == "compiled") for name in ("eager", "compiled")}
    losses: dict[str, list[float]] = {name: [] for name in jobs}
    first_s = {}
    for name, job in jobs.items():
        begin_s = time.perf_counter()
        losses[name].append(whole_step(job, batch))
        first_s[name] = time.perf_counter() - begin_s
    steps = {name: lambda name=name, job=job: losses[name].append(whole_step(job, batch)) for name, job in jobs.items()}
    times_s = alternate(steps, args.rounds)
    states = {name: job.state_dict() for name, job in jobs.items()}
    report = jobs["compiled"].last
    assert report is not None
    ratios = [found / eager for found, eager in zip(times_s["compiled"], times_s["eager"], strict=True)]
    rows.save(
        "compiled",
        {
            "model": f"{args.model} of bench/peers/models.py, sequence 128, batch 8", "micro_batches": MICRO_BATCHES,
            "eager": rows.spread(times_s["eager"]), "compiled": rows.spread(times_s["compiled"]),
            "ratio_of_pairs": statistics.median(ratios), "ratio_of_fastest": min(times_s["compiled"])
            / min(times_s["eager"]), "first_step_s": first_s, "eager_blocks": report.eager_blocks,
            "largest_loss_difference": max(abs(a - b) for a, b in zip(losses["eager"], losses["compiled"])),
            "largest_weight_difference": max(
                float((states["compiled"][name] - value).abs().max()) for name, value in states["eager"].items()
            ),
        },
    )  # fmt: skip
    for job in jobs.values():
        job.close()


def compile_job(model: str, batch: dict[str, torch.Tensor], compile_stages: bool) -> penstock.Job:
    return penstock.compile(
        models.build_model(model),
        penstock.Hardware.cpu(num_devices=1, memory="4GB", dram="4GB"),
        example_inputs=batch,
        optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        micro_batches=MICRO_BATCHES,
        strategy="balanced",
        compile_stages=compile_stages,
    )


if __name__ == "__main__":
    main()
