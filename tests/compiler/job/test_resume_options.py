"""Whether the rates, decays and schedule of a checkpoint or those of the script hold is said, and may be chosen."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PlanError

TOLERANCE = 1e-6  # of weights of about 0.3, which another rate moves by 1e-3
OLD = {
    "optimizer": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "lr_scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10),
}
NEW = {
    "optimizer": partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.5),
    "lr_scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20),
}


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 4)


def job_of(model: nn.Module, x: Tensor, options: Any) -> penstock.Job:
    return penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=x, loss_fn=mean, micro_batches=1,
        strategy="balanced", **options,
    )  # fmt: skip


def save_old(path: Path, steps: int = 3) -> None:
    model, x = model_and_batch()
    with job_of(model, x, OLD) as job:
        for _ in range(steps):
            job.step(x)
        job.save(path)


def step_eager(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    mean(model(x), None).backward()
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("choice", ["checkpoint", "script"])
def test_the_options_of_checkpoint_or_script_hold(tmp_path: Path, choice: str) -> None:
    save_old(tmp_path / "saved")
    model, x = model_and_batch()
    eager = copy.deepcopy(model)
    optimizer = OLD["optimizer"](eager.parameters())
    scheduler = OLD["lr_scheduler"](optimizer)
    for _ in range(3):
        step_eager(eager, optimizer, scheduler, x)
    if choice == "script":
        old, optimizer = optimizer, NEW["optimizer"](eager.parameters())
        optimizer.state = old.state
        scheduler = NEW["lr_scheduler"](optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                scheduler.step()
    with job_of(model, x, NEW) as job:
        if choice == "checkpoint":
            told = r"weight_decay=0\.1 \(the script has 0\.5\); lr_scheduler T_max=10 \(the script has 20\)"
            first = r"initial_lr=0\.01 \(the script has 0\.003\)"
            with pytest.warns(UserWarning, match=rf"{first}; .*{told}.*options=\"script\""):
                job.resume(tmp_path / "saved")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                job.resume(tmp_path / "saved", options="script")
        for _ in range(3):
            job.step(x)
            step_eager(eager, optimizer, scheduler, x)
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(job.state_dict()[name], value, rtol=0, atol=TOLERANCE)
        assert job.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        with pytest.raises(PlanError, match='"checkpoint" or "script"'):
            job.resume(tmp_path / "saved", options="mine")  # type: ignore[arg-type]


def test_equal_options_are_not_told(tmp_path: Path) -> None:
    save_old(tmp_path / "saved")
    model, x = model_and_batch()
    with job_of(model, x, OLD) as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        job.resume(tmp_path / "saved")
        assert job.step_count == 3
