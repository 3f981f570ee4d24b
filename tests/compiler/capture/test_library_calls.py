"""Functions of other libraries that forward calls with tensors: predictions matched with targets, as models that detect
objects do it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import penstock
from penstock.compiler.capture.trace import trace
from penstock.tests.compiler.capture.detector import SGD, Detector, scipy
from penstock.tests.compiler.reasons import reasons_of

__all__ = ["scipy"]  # a fixture


@pytest.mark.parametrize(("queries", "targets", "maximize"), [(3, 2, False), (2, 3, False), (3, 3, True)])
def test_a_model_that_matches_trains_as_in_eager(scipy: None, queries: int, targets: int, maximize: bool) -> None:
    torch.manual_seed(queries)
    model = Detector(maximize)
    batch = {"x": torch.randn(2, queries, 4), "targets": torch.randn(2, targets, 4)}
    twin = copy.deepcopy(model)
    optimizer = SGD(twin.parameters())
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy="balanced", micro_batches=1)
    with job:
        for _ in range(2):
            loss = twin(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert float(job.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-6)
        job.sync()
    torch.testing.assert_close(model.boxes.weight, twin.boxes.weight)


def test_the_program_calls_the_function_on_its_device(scipy: None) -> None:
    code = trace(Detector(), {"x": torch.randn(1, 3, 4), "targets": torch.randn(1, 2, 4)}).module.code
    assert "linear_sum_assignment" in code and ".cpu()" not in code


def test_a_matching_of_rows_needs_the_whole_batch(scipy: None) -> None:
    class OverRows(Detector):
        def forward(self, x: Tensor) -> Tensor:
            found = self.boxes(x)
            rows, columns = self.assign(found.detach())
            return found[rows, columns].sum()

    hardware = penstock.Hardware.cpu(1, memory="64MB")
    job = penstock.compile(OverRows(), hardware, example_inputs={"x": torch.randn(4, 4)}, strategy="balanced")
    with job:
        assert job.plan.micro_batches == 1 and "coupled" in reasons_of(job)
