"""Values that a line of the model may read while it is captured: those that follow from constants, the same at every
step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError


class Model(nn.Module):
    def __init__(self, function: Any, **attributes: Any):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x)).square().mean()


def split(model: Any, h: Tensor) -> Tensor:
    first, second = h.split(model.sizes.tolist(), -1)
    return first * second.sum(-1, keepdim=True)


def repeat(model: Any, h: Tensor) -> Tensor:
    ends = F.pad(torch.repeat_interleave(model.sizes, model.sizes).cumsum(0), (1, 0))
    assert len(ends) == 5
    return h * ends[int(ends[1]) :].sum()


def branch(model: Any, h: Tensor) -> Tensor:
    total = torch.tensor([2, 3]).prod() + model.sizes.max()
    for _ in range(total - 8):
        h = h.tanh()
    return h if total > 4 else h * 100


def change(model: Any, h: Tensor) -> Tensor:
    steps = torch.arange(3)
    steps[1:].add_(model.sizes[:1])
    own = steps.clone()
    return h * len(own.unique()) if model.sizes[1].item() == 3 else h


def read_tuple(model: Any, h: Tensor) -> Tensor:
    largest = model.sizes.max(dim=0)  # a named tuple
    mask = (model.sizes == largest.values)[:, None].expand_as(h[:2])  # of which the shape alone is read
    return h * h[:2][mask].numel() * int(largest.indices)


@pytest.mark.parametrize("function", [split, repeat, branch, change, read_tuple])
def test_known_of_constants_are_part_of_the_program(function: Any) -> None:
    model, x = Model(function, sizes=torch.tensor([1, 3])), torch.randn(3, 4)
    graph = trace(model, x)
    assert graph.eval_error is None
    torch.testing.assert_close(graph.module(x)["loss"], model(x))


def test_a_value_that_was_changed_by_the_batch_is_not_known_any_more() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        steps = torch.arange(3)
        view = steps[1:]
        steps[:1].add_(h.argmax())
        return h * len(view.unique())

    with pytest.raises(CaptureError, match=r"test_known\.py:.*unique"):
        trace(Model(forward), torch.randn(3, 4))


def test_a_value_that_depends_on_an_input_is_not_known() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        return h * (model.sizes + h.argmax()).max().item()

    with pytest.raises(CaptureError, match=r"test_known\.py:(.|\n)*tensor attribute of the model"):
        trace(Model(forward, sizes=torch.tensor([1, 3])), torch.randn(3, 4))
