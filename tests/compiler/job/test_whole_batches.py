"""Batches whose inputs have other first dimensions than rows are one micro-batch, and train as in eager."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
        loss = eager(**copy.deepcopy(batch))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = []
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 1, "strategy": "balanced"}
    with penstock.compile(model, HARDWARE, example_inputs=batch, **options) as job:
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


class Messages(nn.Module):
    """Layers of a graph network: a node adds what the nodes at the other ends of its edges send."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.classes = nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, labels: Tensor) -> dict[str, Tensor]:
        source, target = edge_index
        for layer in self.layers:
            h = layer(x)
            x = (h + torch.zeros_like(h).index_add(0, target, h[source])).relu()
        pooled = torch.zeros(len(labels), 8).index_add(0, graph, x)
        return {"loss": F.cross_entropy(self.classes(pooled), labels)}


@pytest.mark.parametrize("nodes", [10, 11])
def test_graphs_with_their_edges_and_nodes_in_one_tensor(nodes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(nodes, 8), "edge_index": torch.randint(0, nodes, (2, 24)),
        "graph": torch.arange(nodes) * 3 // nodes, "labels": torch.arange(3),
    }  # fmt: skip
    assert_trains_as_eager(Messages(), batch, tmp_path)


class Denoising(nn.Module):
    """A diffusion transformer of one block: patches, and a timestep that scales and shifts what a block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(4, 16, 2, 2), nn.LayerNorm(16, elementwise_affine=False)
        self.time, self.heads = nn.Linear(8, 32), nn.MultiheadAttention(16, 2, batch_first=True)
        self.back = nn.ConvTranspose2d(16, 4, 2, 2)

    def forward(self, latents: Tensor, timestep: Tensor, noise: Tensor) -> dict[str, Tensor]:
        angles = timestep * torch.logspace(0, -2, 4)
        shift, scale = self.time(torch.cat([angles.sin(), angles.cos()])).chunk(2)
        grid = self.patches(latents)
        tokens = grid.flatten(2).transpose(1, 2)
        read = self.norm(tokens) * (1 + scale) + shift
        tokens = tokens + self.heads(read, read, read, need_weights=False)[0]
        return {"loss": (self.back(tokens.transpose(1, 2).unflatten(2, grid.shape[2:])) - noise).square().mean()}


@pytest.mark.slow
def test_a_timestep_without_dimensions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    latents = torch.randn(4, 4, 8, 8)
    batch = {"latents": latents, "timestep": torch.tensor(7), "noise": torch.randn(4, 4, 8, 8)}
    assert_trains_as_eager(Denoising(), batch, tmp_path)


class Adding(nn.Module):
    """Changes a number of the batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, given: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        (number,) = given["numbers"]
        number += 1
        return {"loss": (self.layer(x) * number).square().mean()}


def test_a_number_in_a_nest_that_forward_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "given": {"numbers": [torch.tensor(0.5)]}}
    assert_trains_as_eager(Adding(), batch, tmp_path)
