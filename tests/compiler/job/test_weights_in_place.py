"""Frozen weights that a plan keeps on SSD are read in the user's files, where these are on that disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import SsdError
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.compiler.job.ssd_jobs import on_ssd
from penstock.tests.runtime.ssd.on_disk import directories, file_bytes

WIDTH, FROZEN = 96, 2  # layers; their biases are less than a page
BLOCK_BYTES = 4 * WIDTH * WIDTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(FROZEN))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def job_of(model: nn.Module, tmp_path: Path, num_devices: int = 1, **options: Any) -> tuple[Job, Path]:
    """A job of the model's files, in which each layer is a stage, and its disk."""
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (disk,) = directories(tmp_path)
    with torch.device("meta"):
        empty = Model()
    machine = penstock.Hardware.cpu(num_devices, memory="1MB", dram="8MB", ssd="100MB")
    stages = f"coarsen, partition-balanced{{stages={FROZEN + 1}}}, map-round-robin, schedule-pipeline"
    job = penstock.compile(
        empty, machine, example_inputs={"x": batch(0)}, optimizer=SGD, micro_batches=2, weights=tmp_path,
        strategy=on_ssd(stages=stages), ssd_dirs=[disk], **options,
    )  # fmt: skip
    return job, disk


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Eager:
    """The model in eager PyTorch."""

    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model)
        self.optimizer = SGD(self.model.parameters())

    def losses(self, steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = self.model(batch(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found


def losses(job: Job, steps: range) -> list[float]:
    return [float(job.step({"x": batch(step)})) for step in steps]


def test_pages_that_tensors_share_are_copied_until_other_values_come(model: Model, tmp_path: Path) -> None:
    eager, (job, disk) = Eager(model), job_of(model, tmp_path)
    before, name = (tmp_path / "model.safetensors").read_bytes(), "layers.0.weight"
    with job:
        assert losses(job, range(3)) == pytest.approx(eager.losses(range(3)), rel=1e-5)
        assert file_bytes(disk, "stage0") == 4096 < BLOCK_BYTES  # its bias
        with torch.no_grad():
            eager.model.get_parameter(name).mul_(2)
        job.load_state_dict({name: eager.model.state_dict()[name]}, strict=False)
        assert losses(job, range(3, 5)) == pytest.approx(eager.losses(range(3, 5)), rel=1e-5)
        assert file_bytes(disk, "stage0") > BLOCK_BYTES
        assert torch.equal(job.state_dict()[name], eager.model.state_dict()[name])
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_file_that_changes_under_a_job_ends_it(model: Model, tmp_path: Path) -> None:
    job, _ = job_of(model, tmp_path)
    path = tmp_path / "model.safetensors"
    with job:
        losses(job, range(1))
        path.write_bytes(path.read_bytes())
        with pytest.raises(SsdError, match=rf"{path}: was written after the job began"):
            losses(job, range(1))


@pytest.mark.slow
def test_checked_files_are_copied(model: Model, tmp_path: Path) -> None:
    job, disk = job_of(model, tmp_path, ssd_verify=True)
    with job:
        assert losses(job, range(2)) == pytest.approx(Eager(model).losses(range(2)), rel=1e-5)
        assert file_bytes(disk, "stage0") > BLOCK_BYTES


@pytest.mark.slow
@pytest.mark.multi
def test_workers_read_in_place(model: Model, tmp_path: Path) -> None:
    job, disk = job_of(model, tmp_path, num_devices=2)
    with job:
        assert losses(job, range(2)) == pytest.approx(Eager(model).losses(range(2)), rel=1e-5)
        assert file_bytes(disk, "stage0") == 4096
