"""A script for torchrun: every rank hands over its micro-batches with images of their own sizes, and says what it saw.

torchrun --nproc-per-node=2 forms_of_ranks.py FOLDER STRATEGY
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.tests.compiler.job.test_forms import HIGH, LISTED, SMALL, batch_of, job_of


def main(folder: Path, strategy: str) -> None:
    warnings.simplefilter("ignore")
    rank, found = int(os.environ["RANK"]), dict[str, Any]()
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
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
