"""Functions of other libraries that forward calls with tensors: predictions matched with targets, as models that detect
objects do it."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace

SGD = partial(torch.optim.SGD, lr=0.1)
SCIPY = """
import itertools
import numpy as np

def linear_sum_assignment(cost_matrix, maximize=False):
    cost = np.asarray(cost_matrix) * (-1 if maximize else 1)
    if cost.shape[0] > cost.shape[1]:
        columns, rows = linear_sum_assignment(cost.T)
        return rows[rows.argsort()], columns[rows.argsort()]
    rows = np.arange(cost.shape[0])
    orders = itertools.permutations(range(cost.shape[1]), len(rows))
    return rows, np.array(min(orders, key=lambda order: cost[rows, order].sum()))
"""


@pytest.fixture
def scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SciPy with the one function, by all permutations, here and in workers."""
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy/__init__.py").write_text("")
    (tmp_path / "scipy/optimize.py").write_text(SCIPY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("scipy.optimize")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


class Detector(nn.Module):
    """Three predictions an image, each matched with one of its targets."""

    def __init__(self, maximize: bool = False) -> None:
        super().__init__()
        self.maximize = maximize
        self.boxes = nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found = self.boxes(x)
        with torch.no_grad():
            cost = torch.cdist(found, targets).cpu()
        pairs = [sys.modules["scipy.optimize"].linear_sum_assignment(each, maximize=self.maximize) for each in cost]
        rows = torch.as_tensor(np.concatenate([rows for rows, _ in pairs]), dtype=torch.int64)
        columns = torch.as_tensor(np.concatenate([columns for _, columns in pairs]))
        images = torch.arange(len(x)).repeat_interleave(len(rows) // len(x))
        return (found[images, rows] - targets[images, columns]).square().mean()


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
            rows, columns = sys.modules["scipy.optimize"].linear_sum_assignment(found.detach())
            return found[rows, columns].sum()

    hardware = penstock.Hardware.cpu(1, memory="64MB")
    job = penstock.compile(OverRows(), hardware, example_inputs={"x": torch.randn(4, 4)}, strategy="balanced")
    with job:
        assert job.plan.micro_batches == 1 and "coupled" in job.explain()
