"""Predictions matched with targets on the host, of costs that a GPU computes."""

from __future__ import annotations

import copy

import pytest
import torch

import penstock
from penstock.tests.compiler.capture.detector import SGD, Detector, scipy
from penstock.tests.gpu.rehearsal import exact, on_gpu

__all__ = ["exact", "scipy"]  # fixtures
pytestmark = on_gpu


def test_steps_are_those_of_eager(scipy: None) -> None:
    torch.manual_seed(0)
    model = Detector()
    batch = {"x": torch.randn(2, 3, 4), "targets": torch.randn(2, 2, 4)}
    twin = copy.deepcopy(model)
    optimizer = SGD(twin.parameters())
    machine = penstock.Hardware.detect()
    with penstock.compile(model, machine, example_inputs=batch, optimizer=SGD, micro_batches=1) as job:
        for _ in range(3):
            loss = twin(**batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(job.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-5)
        job.sync()
    torch.testing.assert_close(model.boxes.weight.cpu(), twin.boxes.weight)
