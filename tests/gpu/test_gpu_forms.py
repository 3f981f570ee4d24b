"""Micro-batches of several forms on a GPU: images of several sizes and rows of several lengths in one plan. Steps equal
eager's on a CPU, with weights that stay and weights that move."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.tests.compiler.job.test_forms import (
    LISTED,
    OPTIONS,
    SMALL,
    WIDE,
    Seeing,
    assert_trains_like_eager,
    batch_of,
    eager_loss,
)
from penstock.tests.gpu.rehearsal import REHEARSED, exact, on_gpu

__all__ = ["exact"]  # a fixture
pytestmark = [*on_gpu, pytest.mark.filterwarnings("ignore")]

LONGER = [batch_of(WIDE, SMALL, seed=6, tokens=15), batch_of(SMALL, (), seed=7, tokens=9)]
PLANS = [("balanced", 1), ("mobius", 1), ("gpipe", 2), ("mobius", 2), ("data-parallel", 2), ("zero3-offload", 2)]


def machine(num_devices: int) -> penstock.Hardware:
    if REHEARSED:
        return penstock.Hardware.cpu(num_devices=num_devices, memory="256MB", dram="1GB")
    return penstock.Hardware.detect().with_(num_devices=num_devices, memory="1GB", dram="1GB")


@pytest.mark.parametrize(("strategy", "num_devices"), PLANS)
def test_steps_are_eagers(strategy: str, num_devices: int) -> None:
    if not REHEARSED and torch.cuda.device_count() < num_devices:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    hardware = machine(num_devices)
    with penstock.compile(Seeing(), hardware, example_inputs=LISTED[0], strategy=strategy, **OPTIONS) as job:
        assert_trains_like_eager(job, [*LISTED, LONGER, LISTED[0]])
        found = job.evaluate(LISTED[1], outputs=False).loss
        job.sync()
        torch.testing.assert_close(found.cpu(), eager_loss(job.model, LISTED[1]).detach(), rtol=1e-5, atol=1e-6)
        assert job.last is not None and not any(row["retries"] for row in job.last.allocator.values())
