"""200 steps on English text with weights and states on a disk, against eager PyTorch with everything in RAM.

The text is that of Python's own help pages, read byte by byte. Same micro-batches, same seeds, fused AdamW on both
sides. Without shared weights both do the same additions in the same order, and nothing may differ. A table of words
that is the last layer's weight too is used by two stages: its gradient is the sum of two sums, which eager adds up
micro-batch by micro-batch, so that it may differ in the last bit.

Run: python bench/loss_curve.py [--steps N] [--directory DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.eager import Eager

LAYERS, WIDTH, LENGTH, BATCH, MICRO_BATCHES, LR = 4, 64, 64, 8, 2, 1e-3
MEMORY, DRAM = "8MB", "8MB"
EVERY = 20  # steps between points of the curve in the row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", help="on the disk to use; default: the temporary folder")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/loss_curve.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loss-curve-", dir=args.directory) as folder:
        for tied in (False, True):
            rows.save("loss_curve", curve(tied, args.steps, folder), args.out)


def curve(tied: bool, steps: int, folder: str) -> dict[str, Any]:
    """Train both sides; the row has the largest differences of a loss, and of a weight at the end."""
    text = batches(steps)
    eager = Eager(model(tied), MICRO_BATCHES, LR)
    wanted = [eager.step(batch) for batch in text]
    job = penstock.compile(
        model(tied), penstock.Hardware.cpu(num_devices=1, memory=MEMORY, dram=DRAM, ssd="1GB"), ssd_dirs=[folder],
        example_inputs=text[0], optimizer=partial(torch.optim.AdamW, lr=LR), strategy="fuyou",
        micro_batches=MICRO_BATCHES,
    )  # fmt: skip
    with job:
        found = [float(job.step(batch)) for batch in text]
        weights = job.state_dict()
    apart = max(float((weights[name].cpu() - p.detach()).abs().max()) for name, p in eager.model.named_parameters())
    return {
        "model": f"gpt2 {LAYERS} x {WIDTH}, {'one table' if tied else 'two tables'} of 256 bytes, sequence {LENGTH}",
        "text": "pydoc_data.topics", "steps": steps, "batch": BATCH, "micro_batches": MICRO_BATCHES,
        "stages": len(job.plan.decisions.stages), "written_to_disk_per_step_bytes": write(job.last.moved_bytes),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(found, wanted)),
        "steps_with_equal_loss": sum(a == b for a, b in zip(found, wanted)),
        "largest_weight_difference": apart, "target": None if tied else 0.0,
        "curve": {str(step): found[step] for step in [*range(0, steps, EVERY), steps - 1]},
    }  # fmt: skip


def model(tied: bool) -> torch.nn.Module:
    return models.gpt2(layers=LAYERS, width=WIDTH, tied=tied, vocabulary=256)


def batches(steps: int) -> list[dict[str, Tensor]]:
    """`steps` batches of stretches of bytes, from random places in the text."""
    whole = "\n".join(topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    starts = torch.randint(0, len(data) - LENGTH, (steps, BATCH), generator=torch.Generator().manual_seed(2))
    words = [torch.stack([data[start : start + LENGTH] for start in row]) for row in starts.tolist()]
    return [{"input_ids": piece, "attention_mask": torch.ones_like(piece), "labels": piece.clone()} for piece in words]


def write(moved_bytes: dict[str, int]) -> int:
    return sum(n for route, n in moved_bytes.items() if " -> ssd" in route)


if __name__ == "__main__":
    main()
