"""A script for torchrun: every rank hands over its micro-batches with images of their own sizes, and says what it saw.

torchrun --nproc-per-node=2 forms_of_ranks.py FOLDER STRATEGY|parts
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.tests.compiler.job.test_forms import HIGH, LISTED, PARTS, SMALL, Paired, batch_of, job_of, pair_of


def main(folder: Path, what: str) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    torch.save(parts(rank) if what == "parts" else lists(rank, what), folder / f"rank{rank}.pt")


def lists(rank: int, strategy: str) -> dict[str, Any]:
    found = dict[str, Any]()
    with job_of(LISTED[0], num_devices=2, strategy=strategy) as job:
        own = slice(rank, rank + 1) if strategy == "data-parallel" else slice(None)
        found["losses"] = [job.step(batch[own]) for batch in LISTED]
        wrong = batch_of(HIGH, SMALL)
        wrong["ids"][0, 1] = 5
        try:
            job.step([wrong, wrong][own] if rank else LISTED[0][own])
        except BatchError as error:
            found["refused"] = str(error)
        found["evaluated"] = job.evaluate(LISTED[1][own], outputs=False).loss
        found["weights"] = job.state_dict()
    return found


def parts(rank: int) -> dict[str, Any]:
    losses, refused = list[torch.Tensor](), list[str]()
    torch.manual_seed(0)
    model, options = Paired(), {"strategy": "data-parallel", "micro_batches": 4}
    with job_of(pair_of(batch_of(*[SMALL] * 8)), num_devices=2, model=model, **options) as job:
        for batches, _ in PARTS:
            part = batches[rank]
            try:
                losses.append(job.step(part and pair_of(part)))
            except BatchError as error:
                refused.append(str(error))
        return {"losses": losses, "refused": refused, "weights": job.state_dict()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
