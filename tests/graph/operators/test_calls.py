"""Questions about nodes, by what their functions call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.loss import capture
from penstock.graph.operators.calls import copied_operand
from penstock.graph.operators.record import Elements

CASTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.double(), lambda x: x.to(torch.float16), lambda x: x.type_as(x.sum().double()), lambda x: x.clone(),
    lambda x: x.contiguous(), lambda x: torch.clone(x), lambda x: x.detach(),
]  # fmt: skip
MOVES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mT, lambda x: x.permute(0, 2, 1), lambda x: torch.swapaxes(x, 1, 2), lambda x: x.movedim(1, 2),
]  # fmt: skip
RESHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flatten(1), lambda x: x.view(-1), lambda x: x[:, None], lambda x: x.unflatten(1, (1, -1)),
]  # fmt: skip
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 1, lambda x: x.expand(2, *x.shape)[:, 0], lambda x: torch.relu(x),
]  # fmt: skip


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() + self.function(x).float().mean()


@pytest.mark.parametrize(
    ("functions", "way"), [(CASTS, Elements.SAME), (MOVES, Elements.MOVED), (RESHAPES, Elements.RESHAPED)]
)
def test_the_operand_whose_elements_a_value_has(functions: list[Callable[[Tensor], Tensor]], way: Elements) -> None:
    for function in functions:
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        (given,) = [node for node in graph.nodes if node.op == "placeholder"]
        ways = (Elements.SAME, Elements.MOVED, Elements.RESHAPED)
        node = next(n for n in graph.nodes if copied_operand(graph, n, *ways) is given)
        assert copied_operand(graph, node, way) is given


def test_values_with_other_elements_have_no_such_operand() -> None:
    for function in OTHERS:
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        (given,) = [node for node in graph.nodes if node.op == "placeholder"]
        assert all(copied_operand(graph, node, Elements.SAME, Elements.MOVED) is not given for node in graph.nodes)
