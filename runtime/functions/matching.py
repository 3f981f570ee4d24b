"""The assignment of rows to columns that costs least, as an operator: models that detect objects match predictions with
targets by it. The host computes it, in SciPy, and waits for the costs."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_sum_assignment(cost_matrix: Tensor, maximize: bool = False) -> tuple[Tensor, Tensor]:
    """As SciPy's function. cost_matrix: [rows, columns]. The rows and the columns of the pairs, [min(rows, columns)]
    each, on the device of the costs."""
    rows, columns = torch.ops.penstock.linear_sum_assignment(cost_matrix, maximize)
    return rows, columns


torch.library.define("penstock::linear_sum_assignment", "(Tensor cost_matrix, bool maximize) -> (Tensor, Tensor)")


@torch.library.register_fake("penstock::linear_sum_assignment")
def _(cost_matrix: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    pairs = min(cost_matrix.shape)
    return cost_matrix.new_empty(pairs, dtype=torch.int64), cost_matrix.new_empty(pairs, dtype=torch.int64)


@torch.library.impl("penstock::linear_sum_assignment", ("CPU", "CUDA"))
def _(cost_matrix: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    from scipy.optimize import linear_sum_assignment as assign

    rows, columns = (torch.from_numpy(each) for each in assign(cost_matrix.detach().cpu().numpy(), maximize))
    return rows.to(cost_matrix.device), columns.to(cost_matrix.device)
