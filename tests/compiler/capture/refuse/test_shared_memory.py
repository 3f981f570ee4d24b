"""Tensors over one memory: refused where one of them changes, traced as they are where none does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError


class Sharing(nn.Module):
    def __init__(self, share: Callable[[Sharing], None]):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4))
        self.counts = False
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count.add_(1)
        return (self.second(self.first(x)) + self.shift).square().mean()


def assign_data(model: Sharing) -> None:
    model.second.weight.data = model.first.weight.data


def share_frozen_weights(model: Sharing) -> None:
    assign_data(model.requires_grad_(False))
    model.shift = nn.Parameter(torch.zeros(4))


def overlap_windows(model: Sharing) -> None:
    both = torch.randn(20)
    model.first.weight.data, model.second.weight.data = both[:16].view(4, 4), both[4:].view(4, 4)


def take_turns(model: Sharing) -> None:
    both = torch.randn(16, 2)
    model.first.weight.data, model.second.weight.data = both[:, 0].view(4, 4), both[:, 1].view(4, 4)


def halve_one_vector(model: Sharing) -> None:
    both = torch.randn(32)
    model.first.weight.data, model.second.weight.data = both[:16].view(4, 4), both[16:].view(4, 4)


def view_a_buffer(model: Sharing) -> None:
    model.count = model.shift[:]


def view_a_written_buffer(model: Sharing) -> None:
    view_a_buffer(model)
    model.counts = True


def view_a_weight(model: Sharing) -> None:
    model.shift = model.first.weight.detach()[1]


def tie(model: Sharing) -> None:
    model.second.weight = model.first.weight


REFUSED = {
    assign_data: ("first.weight", "second.weight"),
    overlap_windows: ("first.weight", "second.weight"),
    view_a_written_buffer: ("shift", "count"),
    view_a_weight: ("first.weight", "shift"),
}


@pytest.mark.parametrize("share", REFUSED)
def test_a_tensor_that_changes_has_its_own_memory(share: Callable[[Sharing], None]) -> None:
    with pytest.raises(CaptureError, match="'{}' and '{}' are two tensors over one memory".format(*REFUSED[share])):
        trace(Sharing(share), (torch.randn(2, 4),))


@pytest.mark.parametrize("share", [share_frozen_weights, take_turns, halve_one_vector, view_a_buffer, tie])
def test_others_may_share(share: Callable[[Sharing], None]) -> None:
    trace(Sharing(share), (torch.randn(2, 4),))
