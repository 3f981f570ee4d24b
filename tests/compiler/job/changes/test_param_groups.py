"""The optimizer's options are read from the devices and set on all of them, with the effect that they have in eager."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PlanError

TOLERANCE = 1e-6  # of weights of about 0.3; a rate that is not taken moves them by 1e-3 at least
COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=8)
LAMBDA = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.5, total_iters=6)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
GROUPS = [{"params": ["*.bias"], "weight_decay": 0.0}]


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def case(**options: Any) -> tuple[penstock.Job, nn.Module, Any, Any, Tensor]:
    """A job, and eager with its optimizer and schedule."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    devices, optimizer = options.pop("devices", 1), options.setdefault("optimizer", ADAMW)
    named, schedule = dict(eager.named_parameters()), options.setdefault("lr_scheduler", COSINE)
    biases = [named[name] for name in named if name.endswith("bias")]
    weights = [named[name] for name in named if name.endswith("weight")]
    rows = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
    own = optimizer(rows if "param_groups" in options else eager.parameters())
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=devices), example_inputs=x, loss_fn=mean, micro_batches=1, **options
    )
    return job, eager, own, schedule(own), x


def step_eager(eager: nn.Module, optimizer: Any, schedule: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    mean(eager(x), None).backward()
    optimizer.step()
    schedule.step()


@pytest.mark.parametrize("schedule", [COSINE, LAMBDA])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_options_set_between_steps_train_as_in_eager(devices: int, schedule: Any) -> None:
    job, eager, optimizer, scheduler, x = case(devices=devices, param_groups=GROUPS, lr_scheduler=schedule)
    changes: list[tuple[int, str, Any]] = [
        (0, "lr", 3e-3), (1, "lr", torch.tensor(2e-3)), (1, "weight_decay", 0.5), (0, "betas", (0.5, 0.9)),
    ]  # fmt: skip
    with job:
        for index, key, value in changes:
            job.step(x)
            step_eager(eager, optimizer, scheduler, x)
            assert job.param_groups[index][key] == pytest.approx(optimizer.param_groups[index][key])
            optimizer.param_groups[index][key] = float(value) if isinstance(value, Tensor) else value
            job.param_groups[index][key] = value
            assert job.param_groups[index][key] == pytest.approx(optimizer.param_groups[index][key])
        for _ in range(2):
            job.step(x)
            step_eager(eager, optimizer, scheduler, x)
        assert [group["lr"] for group in job.param_groups] == pytest.approx(scheduler.get_last_lr())
        assert [group["params"] for group in job.param_groups] == [["0.bias", "2.bias"], ["0.weight", "2.weight"]]
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(job.state_dict()[name], value, rtol=0, atol=TOLERANCE)


def test_what_cannot_be_set_is_refused_and_changes_nothing() -> None:
    job, _, _, _, x = case(optimizer=partial(torch.optim.SGD, lr=1e-2))
    with job:
        job.step(x)
        group = job.param_groups[0]
        before = dict(group)
        for key, value, told in (
            ("rate", 1.0, r"param_groups\[0\]\['rate'\]: the options that can be set are"),
            ("params", [], "the options that can be set are"),
            ("lr", "0.1", r"it is 0\.0\d+, and takes another value of that kind"),
            ("nesterov", 1.0, "another value of that kind"),
            ("lr", -1.0, "refuses it"),
            ("momentum", 0.9, r"keeps momentum_buffer, for which the plan has no room: compile with momentum=0\.9"),
        ):
            with pytest.raises(PlanError, match=told):
                group[key] = value
        assert dict(job.param_groups[0]) == before == dict(group)


def test_a_set_option_is_in_a_checkpoint(tmp_path: Any) -> None:
    job, _, _, _, x = case()
    with job:
        job.step(x)
        job.param_groups[0]["weight_decay"] = 0.25
        job.save(tmp_path / "saved")
        job.param_groups[0]["weight_decay"] = 0.5
        job.resume(tmp_path / "saved")
        assert job.param_groups[0]["weight_decay"] == 0.25
