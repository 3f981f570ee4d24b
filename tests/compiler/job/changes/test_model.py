"""A model must not change in a property that a plan has taken from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PlanError


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    model[0].bias.requires_grad_(False)
    return model, torch.randn(4, 4)


def compile_job(model: nn.Module, x: torch.Tensor) -> penstock.Job:
    return penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=x, loss_fn=lambda output, batch: output.mean(),
        strategy="balanced", micro_batches=2,
    )  # fmt: skip


def test_freezing_after_compile_is_refused_at_the_next_step(tmp_path) -> None:
    model, x = make()
    with compile_job(model, x) as job:
        job.step(x)
        model[2].requires_grad_(False)
        with pytest.raises(PlanError, match=r"2\.weight\.requires_grad is False now, .* True, and trains it"):
            job.step(x)
        model[2].requires_grad_(True)
        model[0].requires_grad_(True)
        with pytest.raises(PlanError, match=r"0\.bias\.requires_grad is True now, .* keeps it frozen"):
            job.step(x)
        model[0].bias.requires_grad_(False)
        job.step(x)
        assert job.step_count == 2
        job.write(tmp_path)


@pytest.mark.slow
def test_a_loaded_plan_is_compared_with_the_model_as_well(tmp_path) -> None:
    model, x = make()
    with compile_job(model, x) as job:
        job.write(tmp_path)
    again, _ = make()
    with penstock.load(tmp_path, again) as job:
        job.step(x)
        again.requires_grad_(True)
        with pytest.raises(PlanError, match=r"0\.bias"):
            job.step(x)
