"""Stages with their own numbers of devices, on processes joined by gloo: they train as one device does."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.tests.compiler.eager_baseline import SGD, assert_trains_like_eager, zoo_case

LINE = (
    "coarsen, {mesh}partition-balanced{{stages={stages}}}, map-replicas, {schedule}, insert-remat, insert-fetch, "
    "insert-optimizer"
)
# Adam divides by the root of the second moment: with its usual epsilon a gradient that is zero but for rounding would
# move its weight by a whole step.
ADAM = partial(torch.optim.Adam, lr=1e-3, eps=1e-4)
# Gradients are added on each device and then over devices and stages, in eager one after the other: fp32 sums in
# another order.
TOLERANCE = 3e-6


def compile_job(
    counts: tuple[int, ...],
    optimizer: Any,
    dropout: float,
    max_grad_norm: float | None = None,
    schedule: str = "schedule-1f1b",
    mesh: str = "",
    memory: str = "64MB",
) -> tuple[Job, dict[str, torch.Tensor]]:
    """GPT-2, whose table is tied to its head, on processes: so many devices for each stage."""
    model, batch = zoo_case("gpt2", dropout=dropout)
    lanes = 2 if mesh else 1
    line = LINE.format(stages=len(counts), schedule=schedule, mesh=mesh)
    given = {
        "example_inputs": batch, "optimizer": optimizer, "max_grad_norm": max_grad_norm,
        "hardware": penstock.Hardware.cpu(num_devices=sum(counts) * lanes, memory=memory),
    }  # fmt: skip
    plan = penstock.compile(model, **given, strategy=line, micro_batches=4).plan
    first = [0, *accumulate(counts)]
    copies = {f"stage{i}": [*range(first[i], first[i + 1])] for i, count in enumerate(counts) if count > 1}
    changed = {"devices": first[:-1], "copies": copies}
    plan = plan.model_copy(update={"decisions": plan.decisions.model_copy(update=changed)})
    return penstock.compile(model, **given, plan=plan), batch


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_a_hybrid_with_tied_stages_trains_as_eager(counts: tuple[int, ...], optimizer: Any) -> None:
    """Losses, gradients (by the momentum, or the moments, of every parameter on each device that updates it) and
    weights, with dropout, four micro-batches in a step, and clipping."""
    job, batch = compile_job(counts, optimizer, dropout=0.1, max_grad_norm=0.5)
    tied = next(rows for name, rows in job.folder.interface.groups.items() if name.startswith("tie."))
    assert len(tied) == counts[0] + counts[-1]
    assert_trains_like_eager(job, batch, TOLERANCE, optimizer=optimizer, max_grad_norm=0.5)
