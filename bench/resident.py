"""One device that cannot hold its model: some stages resident, beside all stages fetched, predicted and measured.

Both plans have the same stages and run in turns in one process tree, and each is compared with eager PyTorch: losses of
three steps and the weights after them. On these CPU devices the host's optimizer and the device share the cores, so
resident stages save the way over links that are held down, and over the SSD.

Run: python bench/resident.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import alternate, whole_step

HEAD = "drop-masks, chunk-loss, coarsen, partition-balanced{stages=%d}, map-round-robin, schedule-pipeline, "
SSD = "choose-activations{tier=auto}, insert-fetch, insert-ssd, overlap-optimizer"
DRAM = "insert-remat, insert-fetch, insert-optimizer"
LINKS = {"h2d": "100MB/s", "d2h": "100MB/s"}
CASES: dict[str, dict[str, Any]] = {
    "12 layers": {"layers": 12, "memory": "130MB", "dram": "2GB", "tail": DRAM, **LINKS},
    "16 layers": {"layers": 16, "memory": "130MB", "dram": "2GB", "tail": DRAM, **LINKS},
    "16 layers, DRAM too small": {"layers": 16, "memory": "130MB", "dram": "190MB", "ssd": "2GB", "tail": SSD, **LINKS},
}
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = models.batch(size=4, length=64, vocabulary=1024)
    for case, wishes in CASES.items():
        measure(case, dict(wishes), batch, args.rounds)


def train_eager(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps over the whole batch, and the weights after them."""
    optimizer, losses = ADAMW(model.parameters()), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model.state_dict()


def measure(case: str, wishes: dict[str, Any], batch: dict[str, Tensor], rounds: int) -> None:
    layers, tail = wishes.pop("layers"), wishes.pop("tail")
    machine = penstock.Hardware.cpu(num_devices=1, **wishes)
    head, tier = HEAD % (layers + 2), "auto" if "ssd" in wishes else "none"
    kept = {"fetched": "", "resident": f"keep-stages{{tier={tier}}}, "}
    wanted, weights = train_eager(models.gpt2(layers=layers, vocabulary=1024), batch)
    with ExitStack() as stack:
        jobs, apart = {}, {}
        for name, keep in kept.items():
            disks = [stack.enter_context(tempfile.TemporaryDirectory())] if "ssd" in wishes else None
            job = penstock.compile(
                models.gpt2(layers=layers, vocabulary=1024), machine, example_inputs=batch, micro_batches=2,
                optimizer=ADAMW, strategy=f"{head}{keep}{tail}", ssd_dirs=disks,
            )  # fmt: skip
            jobs[name] = stack.enter_context(job)
            losses = [float(job.step(batch)) for _ in range(3)]
            apart[name] = {
                "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted)),
                "weights": max(float((job.state_dict()[name] - w).abs().max()) for name, w in weights.items()),
            }
        times_s = alternate({name: partial(whole_step, job, batch) for name, job in jobs.items()}, rounds)
        predicted = {name: job.plan.predicted.step_s for name, job in jobs.items()}
        rows.save(
            "resident",
            {
                "case": case, "model": f"gpt2 {layers} x 256, vocabulary 1024, batch 4 x 64", **wishes,
                "resident_stages": len(jobs["resident"].plan.decisions.resident), "stages": layers + 2,
                "steps": {name: rows.spread(took) for name, took in times_s.items()}, "predicted_s": predicted,
                "predicted_ratio": predicted["resident"] / predicted["fetched"],
                "ratio": statistics.median(times_s["resident"]) / statistics.median(times_s["fetched"]),
                "moved_bytes": {name: job.last.moved_bytes for name, job in jobs.items()}, "apart_from_eager": apart,
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
