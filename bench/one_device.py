"""One device with everything resident: a step of Penstock against eager PyTorch with the same micro-batches.

Run: python bench/one_device.py [--micro-batches M] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.eager import Eager
from penstock.bench.peers.timing import alternate, whole_step

TARGET = 1.05
LR = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch, losses = models.batch(), {"penstock": [], "eager": []}
    eager = Eager(models.gpt2(), args.micro_batches, LR)
    job = penstock.compile(
        models.gpt2(),
        penstock.Hardware.cpu(num_devices=1, memory="4GB", dram="4GB"),
        example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=LR),
        micro_batches=args.micro_batches,
    )
    with job:
        times_s = alternate(
            {
                "penstock": lambda: losses["penstock"].append(whole_step(job, batch)),
                "eager": lambda: losses["eager"].append(eager.step(batch)),
            },
            args.rounds,
        )
    ratios = [ours / theirs for ours, theirs in zip(times_s["penstock"], times_s["eager"])]
    rows.save(
        "one_device",
        {
            "model": "gpt2 8 x 256, vocabulary 8192, sequence 128, batch 8", "micro_batches": args.micro_batches,
            "penstock": rows.spread(times_s["penstock"]), "eager": rows.spread(times_s["eager"]),
            "ratio": statistics.median(times_s["penstock"]) / statistics.median(times_s["eager"]),
            "ratio_of_pairs": statistics.median(ratios), "target": TARGET,
            "largest_loss_difference": max(abs(a - b) for a, b in zip(losses["penstock"], losses["eager"])),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
