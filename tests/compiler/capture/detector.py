"""A model that matches predictions with targets, and a SciPy for it where there is none."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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

    @staticmethod
    def assign(cost: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = sys.modules["scipy.optimize"].linear_sum_assignment(cost, **options)
        return found

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found = self.boxes(x)
        with torch.no_grad():
            cost = torch.cdist(found, targets).cpu()
        pairs = [self.assign(each, maximize=self.maximize) for each in cost]
        rows = torch.as_tensor(np.concatenate([rows for rows, _ in pairs]), dtype=torch.int64)
        columns = torch.as_tensor(np.concatenate([columns for _, columns in pairs]))
        images = torch.arange(len(x)).repeat_interleave(len(rows) // len(x))
        return (found[images, rows] - targets[images, columns]).square().mean()
