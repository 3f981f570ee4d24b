"""A script for torchrun: ranks change weights and rates between steps as eager does, then one rank alone does.

torchrun --nproc-per-node=2 -m penstock.tests.compiler.job.changes.changing_rank FOLDER STRATEGY [weights | modules]

Each rank writes FOLDER/rankR.json: the largest difference of a loss, and the error of the change that one rank makes.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
RANK = int(os.environ.get("RANK", "0"))


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def main(folder: Path, strategy: str, alone: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    optimizer, differences = SGD(eager.parameters()), []
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=2), example_inputs=x, optimizer=SGD, loss_fn=loss, strategy=strategy,
        timeout_s=60,
    )  # fmt: skip
    for step in range(3):
        optimizer.zero_grad()
        wanted = loss(eager(x), None)
        wanted.backward()
        optimizer.step()
        differences.append(abs(float(job.step(x)) - wanted.item()))
        job.sync()
        with torch.no_grad():
            for net in (model, eager):
                net[2].weight.mul_(0.5)
        job.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
    error = ""
    if RANK == 1 and alone == "weights":
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    elif RANK == 1:
        model[1] = nn.Identity()
    try:
        job.step(x)
    except PenstockError as refused:
        error = str(refused)
    (folder / f"rank{RANK}.json").write_text(json.dumps({"difference": max(differences), "error": error}))
    os._exit(0)  # the ranks no longer agree on what to close


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
