"""Files of 0.1 (versions/v0_1) are read by this version, and train on to the same losses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.plan import Plan
from penstock.ir.errors import CheckpointError, PlanError

FILES = Path(__file__).parent / "versions" / "v0_1"
EXPECTED = json.loads((FILES / "expected.json").read_text())


class Net(nn.Module):
    """The model of the files."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.cross_entropy(self.head(hidden), y)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}
        for _ in range(3)
    ]


def compile_net(**more: Any) -> penstock.Job:
    machine = penstock.Hardware.cpu(num_devices=2, memory="64MB", dram="256MB")
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return penstock.compile(Net(), machine, example_inputs=batches()[0], optimizer=optimizer, **more)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(FILES, tmp_path / "files")


def test_a_plan_file_gives_the_same_plan() -> None:
    plan = Plan.load(FILES / "job" / "plan.json")
    assert plan.hash == EXPECTED["hash"]
    with compile_net(plan=FILES / "job" / "plan.json") as job:
        assert job.plan.hash == EXPECTED["hash"]


@pytest.mark.multi
def test_a_job_folder_runs_and_a_checkpoint_goes_on() -> None:
    with penstock.load(FILES / "job", Net()) as job:
        assert job.resume(FILES / "checkpoint") == {"epoch": 1}
        assert job.step(batches()[2]).item() == pytest.approx(EXPECTED["losses"][2], rel=1e-5)


@pytest.mark.multi
def test_a_checkpoint_goes_on_under_another_plan() -> None:
    with compile_net(strategy="gpipe", micro_batches=4) as job:
        job.resume(FILES / "checkpoint")
        assert job.step(batches()[2]).item() == pytest.approx(EXPECTED["losses"][2], rel=1e-5)


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_files_of_a_later_version_are_refused_with_what_to_do(copy: Path) -> None:
    change(copy / "job" / "plan.json", of_later=1)
    with pytest.raises(PlanError, match=r"plan\.json: of_later.*another version of Penstock.*search anew"):
        Plan.load(copy / "job" / "plan.json")
    change(copy / "checkpoint" / "manifest.json", version=2)
    with compile_net() as job, pytest.raises(CheckpointError, match=r"version 2; this .*reads version 1.*A later"):
        job.resume(copy / "checkpoint")


def test_settings_of_a_later_version_are_refused_with_what_to_do(copy: Path) -> None:
    change(copy / "job" / "settings.json", of_later=1)
    with pytest.raises(PlanError, match=r"settings\.json: of_later.*another version.*compile the job again"):
        penstock.load(copy / "job", Net())
