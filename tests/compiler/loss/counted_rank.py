"""A script for torchrun: every rank trains on its own rows of a batch whose labels are uneven, and says what it saw.

torchrun --nproc-per-node=N counted_rank.py FOLDER [data-parallel | hybrid] [whole]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import penstock
from penstock.tests.compiler.job.fed_by_rank import STRATEGIES
from penstock.tests.compiler.loss.rules import Loss, class_weights, rows
from penstock.tests.compiler.loss.whole_batch import PLAIN

COUNTS = (6, 1, 3, 2, 0, 0, 0, 0)  # the second of two lanes has nothing to count
MICRO_BATCHES = 4


def main(folder: Path, strategy: str, words: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch, model = rows(COUNTS), Loss(class_weights)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hardware = penstock.Hardware.cpu(num_devices=world)
    with penstock.compile(
        model, hardware, example_inputs=batch, optimizer=PLAIN, strategy=STRATEGIES.get(strategy, strategy),
        micro_batches=MICRO_BATCHES,
    ) as job:  # fmt: skip
        given: Any = {name: value[job.rows.start : job.rows.stop] for name, value in batch.items()}
        if "whole" in words:
            given = batch
        elif not job.inputs:
            given = None
        found: dict[str, Any] = {"inputs": job.inputs, "evaluated": float(job.evaluate(given)["loss"])}
        found["loss"] = float(job.step(given))
        after = job.state_dict()
        found["gradients"] = {name: (value - after[name]).tolist() for name, value in before.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
