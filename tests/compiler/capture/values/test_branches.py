"""Branches on draws against a bound that no draw crosses, as of layers that are dropped with probability 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError

Condition = Callable[[Tensor], Tensor]

CONDITIONS: dict[str, tuple[Condition, bool]] = {
    "more than 0": (lambda draw: draw > 0.0, True),
    "0 or more": (lambda draw: draw >= 0, True),
    "less than 0": (lambda draw: draw < 0.0, False),
    "not more than 0": (lambda draw: draw <= 0, False),
    "more than 1": (lambda draw: torch.gt(draw, 1.0), False),
    "less than 1": (lambda draw: draw < 1.0, True),
}


class Dropped(nn.Module):
    """A model that calls a layer if a condition of a draw holds."""

    def __init__(self, condition: Condition):
        super().__init__()
        self.layer, self.condition = nn.Linear(4, 4), condition

    def forward(self, x: Tensor) -> Tensor:
        if self.condition(torch.rand(1)):
            x = self.layer(x)
        return (x * self.layer.weight.sum()).sum()


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_draw_against_a_bound_that_it_never_meets(name: str) -> None:
    condition, holds = CONDITIONS[name]
    graph = trace(Dropped(condition), torch.ones(2, 4))
    assert any(node.target == "layer" for node in graph.nodes) == holds
    assert any(node.meta.get("random") for node in graph.nodes)  # the draw stays, for those after it


def test_a_draw_that_may_go_either_way_is_refused() -> None:
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        trace(Dropped(lambda draw: draw > 0.5), torch.ones(2, 4))
