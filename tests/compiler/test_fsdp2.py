"""bf16-true computes what FSDP2 computes with bf16 parameters and fp32 sums, on CPUs over gloo."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.tests.compiler import fsdp2_rank
from penstock.tests.compiler.fleet_matrix import DEVICE, TIERS, distance, in_process, with_counts
from penstock.tests.compiler.plain_precision import upcasting

STEPS, LR = 5, 1e-2
ADAMW = partial(torch.optim.AdamW, lr=LR)


def by_fsdp2(world: int, folder: Path, weights: Any, batches: Any, micro_batches: int) -> dict[str, Any]:
    given = {"weights": weights, "batches": batches, "micro_batches": micro_batches // world, "lr": LR}
    torch.save(given, folder / "given.pt")
    command = [sys.executable, str(fsdp2_rank.__file__)]
    ranks = [subprocess.Popen([*command, str(rank), str(world), str(folder)]) for rank in range(world)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * world
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("world", [1, 2])
def test_true_bf16_is_fsdp2s(tmp_path: Path, world: int) -> None:
    """Both round every activation to 8 bits in the same places and add gradients in fp32. Losses differ by at most
    2^-8, one unit of bf16; masters by 5 % of how far they moved, as Adam turns the sign of a gradient near 0 that was
    rounded otherwise into a whole step. Two ranks here are two replicas of a stage that they share."""
    model, _ = upcasting()
    batches = [upcasting(seed)[1] for seed in range(STEPS)]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    theirs = by_fsdp2(world, tmp_path, model.state_dict(), batches, 4)
    mesh = f"mesh{{shards={world}, depth=1}}"
    line = (
        f"coarsen, {mesh}, partition-balanced{{stages=2}}, map-round-robin, schedule-1f1b, {TIERS[DEVICE, world > 1]}"
    )
    hardware = penstock.Hardware.cpu(num_devices=world, memory="64MB", dram="1GB")
    job = penstock.compile(
        model, hardware, example_inputs=batches[0], optimizer=ADAMW, micro_batches=4, strategy=line,
        precision="bf16-true",
    )  # fmt: skip
    machine = in_process(job, model, optimizer=ADAMW)
    losses = [float(machine.step(with_counts(job, batch))["loss"]) for batch in batches]
    assert losses == pytest.approx(theirs["losses"], rel=2**-8)
    found = {name: weight.detach() for name, weight in machine.weights().items()}
    assert distance(found, theirs["weights"]) <= 0.05 * distance(found, start)
    assert distance(found, start) > 0
