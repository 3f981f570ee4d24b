"""A script for torchrun: every rank reads its own rows of 23 numbered samples, trains, saves and says what it saw.

torchrun --nproc-per-node=N fed_by_parts.py FOLDER STEPS [pipeline | hybrid] [save] [resume] [uneven] [early] [again]
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.compiler.job.sampler import RankSampler

BATCH = 8
STRATEGIES = {
    "pipeline": "gpipe",
    "hybrid": "coarsen, mesh{depth=2}, partition-balanced{stages=2}, map-round-robin, schedule-1f1b, insert-remat, "
    "insert-fetch, insert-optimizer",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=made) / 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - y).square().mean()


class Samples(Dataset[dict[str, Tensor]]):
    """Sample i depends on i alone; `read` lists the indices that were asked for."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        made = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=made), "y": torch.randn(1, generator=made)}


def compile_job(devices: int, strategy: str = "data-parallel") -> penstock.Job:
    example = {"x": torch.zeros(BATCH, 4), "y": torch.zeros(BATCH, 1)}
    return penstock.compile(
        Net(), penstock.Hardware.cpu(num_devices=devices), example_inputs=example, micro_batches=4, strategy=strategy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    )  # fmt: skip


def train(job: penstock.Job, samples: Samples, steps: int, start: int | None = None) -> list[float]:
    """Losses of `steps` steps, from sample `start` on if given, over any number of epochs."""
    losses: list[float] = []
    sampler = job.sampler(samples, start=start)
    loader = DataLoader(samples, batch_sampler=sampler)
    while len(losses) < steps:
        batches = loader if job.inputs else (None for _ in sampler)
        losses += [float(job.step(batch)) for batch in islice(batches, steps - len(losses))]
    return losses


def train_on_whole_batches(job: penstock.Job, samples: Samples, steps: int) -> list[float]:
    loader = DataLoader(samples, batch_sampler=RankSampler(len(samples), BATCH))
    return [float(job.step(batch)) for batch in islice(itertools.chain(loader, loader, loader), steps)]


def weights(job: penstock.Job) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in job.state_dict().items()}


def said_of(call: Callable[[Any], Any], argument: Any) -> str:
    try:
        call(argument)
    except penstock.errors.BatchError as error:
        return str(error)
    return "nothing"


def main(folder: Path, steps: int, words: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples, found = Samples(), {}
    strategy = next((STRATEGIES[word] for word in words if word in STRATEGIES), "data-parallel")
    with compile_job(world, strategy) as job:
        if "resume" in words:
            job.resume(folder / "saved")
        found["losses"] = train(job, samples, steps)
        if "uneven" in words:
            rows = len(job.rows) - (rank == world - 1)
            found["uneven"] = said_of(job.step, {"x": torch.zeros(rows, 4), "y": torch.zeros(rows, 1)})
        if "early" in words:  # the last rank's data has ended: it saves while the others go on
            one = {"x": torch.zeros(len(job.rows), 4), "y": torch.zeros(len(job.rows), 1)}
            found["early"] = said_of(job.save, folder / "early") if rank == world - 1 else said_of(job.step, one)
        if "save" in words:
            job.save(folder / "saved", data={"note": "of the script"})
        whole = {"x": torch.ones(BATCH, 4), "y": torch.ones(BATCH, 1)}
        part = {name: value[job.rows.start : job.rows.stop] for name, value in whole.items()}
        found |= {"inputs": job.inputs, "rows": [job.rows.start, job.rows.stop], "read": samples.read}
        found |= {"weights": weights(job), "evaluated": float(job.evaluate(part)["loss"])}
        if "again" in words:
            job.close()
            with compile_job(world, strategy) as job:
                found |= {"again": train_on_whole_batches(job, Samples(), steps), "weights again": weights(job)}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
