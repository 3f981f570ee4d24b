"""The files of a job say for whom they are: all devices that run them, and who is in the groups that they name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.tests.compiler.eager_baseline import SGD

AFTER = "schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"


class Narrow(nn.Module):
    """Two linear layers, of which members of a team can have parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.parametrize(
    ("num_devices", "passes", "first", "rows"),
    [
        (
            4,
            f"split-width, coarsen, mesh, partition-balanced{{stages=1}}, map-round-robin, {AFTER}",
            "device 0 of 1 of each of 4 lanes (cpu0, root complex 0)",
            ["run by   cpu0, cpu1, cpu2, cpu3", "groups   as cpu0 has them: replicas (cpu0, cpu2), team (cpu0, cpu1)"],
        ),
        (
            2,
            f"coarsen, partition-balanced{{stages=1}}, map-replicas, {AFTER}",
            "device 0 of 2 (cpu0, root complex 0)",
            ["groups   copies.stage0 (cpu0, cpu1)"],
        ),
    ],
)
def test_a_header_says_who_runs_the_file_and_who_is_in_its_groups(
    num_devices: int, passes: str, first: str, rows: list[str]
) -> None:
    machine = penstock.Hardware.cpu(num_devices=num_devices, memory="8MB", dram="1GB")
    batch = {"x": torch.zeros(4, 4)}
    job = penstock.compile(Narrow(), machine, example_inputs=batch, optimizer=SGD, micro_batches=2, strategy=passes)
    header = job.code(0).split('"""')[1].splitlines()
    assert header[0].endswith(first)
    assert header[-len(rows) :] == rows and not [
        row for row in header[1 : -len(rows)] if row[:6] in ("run by", "groups")
    ]
