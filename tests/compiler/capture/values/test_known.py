"""Values that a line of the model may read while it is captured: those that follow from constants, and from buffers
that forward leaves alone, the same at every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError, PenstockError


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


def count(model: Any, h: Tensor) -> Tensor:
    place = torch.tensor(0)
    for _ in range(3):
        place += 1
        h = h * int(place)  # 1, 2, 3, also when forward is called again to see whether it repeats itself
    return h


def read_tuple(model: Any, h: Tensor) -> Tensor:
    largest = model.sizes.max(dim=0)  # a named tuple
    mask = (model.sizes == largest.values)[:, None].expand_as(h[:2])  # of which the shape alone is read
    return h * h[:2][mask].numel() * int(largest.indices)


@pytest.mark.parametrize("function", [split, repeat, branch, change, count, read_tuple])
def test_known_of_constants_are_part_of_the_program(function: Any) -> None:
    model, x = Model(function, sizes=torch.tensor([1, 3])), torch.randn(3, 4)
    graph = trace(model, x)
    assert graph.eval_error is None
    torch.testing.assert_close(graph.module(x)["loss"], model(x))


def test_a_size_that_is_a_tensor_is_a_number_of_a_known_tensor_too() -> None:
    """As of Longformer's masks."""

    def forward(model: Any, h: Tensor) -> Tensor:
        return h * h.new_ones(6).view(torch.div(6, 2, rounding_mode="trunc"), 2).sum(1, keepdim=True)

    graph = trace(Model(forward), torch.randn(3, 4))
    (view,) = (node for node in graph.nodes if node.target == "view")
    assert view.args[1:] == (3, 2)


def test_a_value_that_was_changed_by_the_batch_is_not_known_any_more() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        steps = torch.arange(3)
        view = steps[1:]
        steps[:1].add_(h.argmax())
        return h * len(view.unique())

    with pytest.raises(CaptureError, match=r"test_known\.py:.*unique"):
        trace(Model(forward), torch.randn(3, 4))


def test_a_value_that_was_drawn_in_place_is_not_known_any_more() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        noise = torch.zeros(2)
        noise.uniform_(1, 2)
        return h if noise.sum() > 0 else h * 100

    with pytest.raises(CaptureError, match=r"test_known\.py:.*noise"):
        trace(Model(forward), torch.randn(3, 4))


def test_a_value_that_depends_on_an_input_is_not_known() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        return h * (model.sizes + h.argmax()).max().item()

    with pytest.raises(CaptureError, match=r"test_known\.py:(.|\n)*tensor attribute of the model"):
        trace(Model(forward, sizes=torch.tensor([1, 3])), torch.randn(3, 4))


class Switched(nn.Module):
    """Reads buffers as numbers, as EoMT does for the share of queries whose masks it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shares, self.kept = nn.Buffer(torch.tensor([1.0, 0.5])), nn.Buffer(torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for share in self.shares:
            h = h.tanh() if share < 1 else h * 3
        return self.last(h)[:, self.kept.nonzero().flatten()].square().mean()


@pytest.mark.slow
def test_a_buffer_that_a_line_reads_is_the_same_in_each_step() -> None:
    model, x = Switched(), torch.randn(4, 4)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="256MB", dram="1GB")
    optimizer = partial(torch.optim.SGD, lr=0.5)
    with penstock.compile(model, hardware, example_inputs={"x": x}, optimizer=optimizer, micro_batches=2) as job:
        torch.testing.assert_close(job.step({"x": x}), model(x).detach())
        job.load_state_dict({**job.state_dict(), "shares": torch.zeros(2)})
        with pytest.raises(PenstockError, match="numbers of buffer 'shares', which has others than at compile"):
            job.step({"x": x})
            job.sync()


def test_a_buffer_that_forward_changes_is_not_known() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        model.count += 1
        return h if model.count > 2 else h * 2

    model = Model(forward)
    model.count = nn.Buffer(torch.tensor(0))
    with pytest.raises(CaptureError, match=r"test_known\.py:.*count > 2.*\n  this line needs the value"):
        trace(model, torch.randn(3, 4))
