"""Batches whose inputs have other first dimensions than rows are one micro-batch, and train as in eager."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock

SGD = partial(torch.optim.SGD, lr=0.1)
HARDWARE = penstock.Hardware.cpu(num_devices=1, memory="64MB")


class Pictures(nn.Module):
    """Adds to each row what its pictures give, of which some rows have several and some none."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.pictures = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, pictures: Tensor, row: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.rows(x).tanh().index_add(0, row, self.pictures(pictures))
        return {"loss": (h - labels).square().mean()}


class Boxes(nn.Module):
    """Takes a dict of targets for each row, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = self.boxes(x)
        losses = [(each - target["boxes"].mean(0)).abs().sum() for each, target in zip(found, labels)]
        return {"loss": torch.stack(losses).mean()}


def assert_trains_as_eager(model: nn.Module, batch: dict[str, object], folder: Path) -> None:
    eager = copy.deepcopy(model)
    optimizer, losses = SGD(eager.parameters()), []
    for _ in range(3):
        loss = eager(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = []
    with penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, micro_batches=1) as job:
        job.write(folder)
        found += [float(job.step(batch)) for _ in range(2)]
        job.sync()
    with penstock.load(folder, model) as job:
        found.append(float(job.step(batch)))
        job.sync()
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))


def test_five_pictures_for_four_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(4, 8), "pictures": torch.randn(5, 8), "row": torch.tensor([0, 0, 1, 3, 3]),
        "labels": torch.randn(4, 8),
    }  # fmt: skip
    assert_trains_as_eager(Pictures(), batch, tmp_path)


def test_targets_of_each_row_in_a_list(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "labels": [{"boxes": torch.randn(n, 4)} for n in (1, 3, 2, 4)]}
    assert_trains_as_eager(Boxes(), batch, tmp_path)
