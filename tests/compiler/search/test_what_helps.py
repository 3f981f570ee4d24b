"""Gains of more of anything are not mixed up with those of another plan without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.search.what_helps import SAME


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
def test_other_plans_for_the_machine_at_hand_come_first_where_they_gain(swap: bool) -> None:
    batch = {"x": torch.zeros(4, 64), "y": torch.zeros(4, 64)}
    tiers = f"insert-remat{{always={swap}}}, insert-fetch{{swap={swap}}}, insert-optimizer".lower()
    line = f"coarsen, partition-balanced{{stages=1}}, map-round-robin, schedule-pipeline, {tiers}"
    machine = penstock.Hardware.cpu(1, memory="64MB", dram="1GB")
    job = penstock.compile(Net(), machine, example_inputs=batch, strategy=line, micro_batches=2)
    assert job.replanner is not None and job.plan.predicted is not None
    helps = job.replanner.helps()
    assert (helps[0].change == SAME) == swap
    if swap:
        assert helps[0].step_s is not None and helps[0].step_s < 0.99 * job.plan.predicted.step_s
        assert SAME in job.explain(full=True)
