"""Jobs on CPUs whose graph a pass rewrites, beside eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close


def job_of(
    model: nn.Module, batch: Any, strategy: str, devices: int = 1, memory: str = "64MB", **options: Any
) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory=memory, dram="1GB")
    given = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": strategy, **options}
    return penstock.compile(copy.deepcopy(model), hardware, example_inputs=batch, **given)


def assert_trains_and_evaluates_like_eager(job: Job, batch: Any, tolerance: float) -> None:
    """Losses and weights of two steps: after SGD's first step a weight has moved by its gradient. Then the loss of an
    evaluation. The sums over micro-batches, tiles and chunks are made in another order than eager's."""
    eager = Eager(job.model)
    for _ in range(2):
        torch.testing.assert_close(job.step(batch), eager.step(batch), rtol=tolerance, atol=0)
    job.sync()
    found = {name: p.detach() for name, p in job.model.named_parameters()}
    assert_close(found, {name: p.detach() for name, p in eager.params.items()}, tolerance)
    torch.testing.assert_close(job.evaluate(batch)["loss"], eager.evaluate(batch), rtol=tolerance, atol=0)
