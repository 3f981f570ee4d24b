"""Sparse tensors that forward makes of coordinates are dense in a program, and their values are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.errors import CaptureError

PLACES = torch.tensor([[0, 1, 1, 3, 1], [2, 0, 3, 3, 0]], dtype=torch.int32)  # one of them twice
Use = Callable[[Tensor, Tensor], Tensor]

USES: dict[str, Use] = {
    "added": lambda sparse, x: x @ (torch.ones(4, 4) + sparse),
    "added in place": lambda sparse, x: x @ torch.ones(4, 4).add_(sparse),
    "a product": lambda sparse, x: torch.sparse.mm(sparse.coalesce(), x.t()),
    "made dense": lambda sparse, x: x * sparse.to_dense().sum(),
    "counted": lambda sparse, x: (sparse @ x.t()) * sparse._nnz(),
}


class Sparse(nn.Module):
    def __init__(self, use: Use):
        super().__init__()
        self.values, self.use = nn.Parameter(torch.arange(1.0, 6.0)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.sparse_coo_tensor(PLACES, self.values * 2, (4, 4)), x).square().sum()


@pytest.mark.parametrize("name", USES)
def test_loss_and_gradients_are_those_of_the_sparse_tensor(name: str) -> None:
    model: Any = Sparse(USES[name])
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    (wanted,) = torch.autograd.grad(expected, model.values)
    found = trace(model, x).module(x)["loss"]
    (gradient,) = torch.autograd.grad(found, model.values)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


def test_how_many_places_differ_is_not_known() -> None:
    with pytest.raises(CaptureError, match="_nnz"):
        trace(Sparse(lambda sparse, x: x * sparse.coalesce()._nnz()), torch.randn(3, 4))
