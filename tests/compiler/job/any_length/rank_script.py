"""A script for torchrun: trains on batches of many lengths, which each rank has whole or only its own part of.

torchrun --nproc-per-node=2 rank_script.py FOLDER (gpipe | data-parallel) (whole | parts)
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import penstock
from penstock.tests.compiler.job.any_length.eager import SGD, tokens
from penstock.tests.zoo import without_cache, zoo

WHOLE = [tokens(8, 32), tokens(8, 48, 1), tokens(6, 7, 2), [tokens(2, n, n) for n in (5, 48, 20, 31)]]
# Micro-batches of which each of two lanes has the first or the last two.
PARTS = [[tokens(2, n, n) for n in (9, 33, 48, 6)], [tokens(1, n, n) for n in (40, 8, 21, 30)]]


def main() -> None:
    folder, strategy, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = without_cache(zoo()["llama"](dropout=0.0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = penstock.compile(
            model,
            penstock.Hardware.cpu(2, memory="64MB"),
            example_inputs=tokens(8, 32),
            dynamic_shapes=(Dim("rows", max=8), Dim("sequence", max=48)),
            optimizer=SGD,
            micro_batches=4,
            strategy=strategy,
        )
    losses: list[float] = []
    with job:
        for batch in WHOLE if kind == "whole" else PARTS:
            given: Any = batch
            if kind == "parts":
                given = batch[2 * rank : 2 * rank + 2]
            elif not job.inputs:
                given = None
            losses.append(float(job.step(given)))
        job.sync()
    found = {"losses": losses, "weights": {name: p.tolist() for name, p in model.named_parameters()}}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
