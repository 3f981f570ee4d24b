"""Changes in place: capture refuses those that eager PyTorch refuses, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError

Write = Callable[[nn.Module, Tensor], Tensor]


class Written(nn.Module):
    """A linear layer whose result goes through `write`."""

    def __init__(self, write: Write):
        super().__init__()
        self.write, self.first, self.last = write, nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("steps", torch.ones(()))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self, self.first(x))).square().mean()


def attend(model: nn.Module, h: Tensor) -> Tensor:
    q = h.view(2, 1, 4, 6)
    return F.scaled_dot_product_attention(q, q, q).mul_(2).view(8, 6)


def write_operand_later(model: nn.Module, h: Tensor) -> Tensor:
    kept = h * h
    h.add_(1)
    return kept


def write_view(model: nn.Module, h: Tensor) -> Tensor:
    made = h.exp()
    made[:, 0].zero_()
    return made


def write_buffer(model: nn.Module, h: Tensor) -> Tensor:
    made = h * model.steps
    model.steps.add_(1)
    return made


def write_weight(model: nn.Module, h: Tensor) -> Tensor:
    made = h * model.scale
    with torch.no_grad():
        model.scale.clamp_(-1, 1)
    return made


def write_mask(model: nn.Module, h: Tensor) -> Tensor:
    made = torch.sigmoid(h)
    made[:, 1] = 0.0
    return made


KINDS: dict[str, Write] = {
    "exp": lambda model, h: h.exp().mul_(3),
    "sigmoid": lambda model, h: torch.sigmoid(h).add_(1),
    "softmax": lambda model, h: h.softmax(-1).mul_(2),
    "tanh_ twice": lambda model, h: h.tanh_().tanh_(),
    "relu": lambda model, h: torch.relu(h).mul_(2),
    "relu in place": lambda model, h: F.relu(h, inplace=True),
    "dropout in place": lambda model, h: F.dropout(h, 0.5, inplace=True),
    "sum": lambda model, h: (h + h).mul_(2),
    "norm": lambda model, h: F.layer_norm(h, (6,)).mul_(2),
    "square": lambda model, h: h.square().mul_(2),
    "a clone": lambda model, h: h.exp().clone().mul_(2),
    "not trained": lambda model, h: h + h.detach().exp().mul_(2),
    "without gradients": lambda model, h: h + torch.no_grad()(lambda: h.exp().mul_(2))(),
    "attention": attend,
    "an operand later": write_operand_later,
    "a view": write_view,
    "a buffer": write_buffer,
    "a weight": write_weight,
    "some columns": write_mask,
}


@pytest.mark.parametrize("kind", KINDS)
def test_capture_refuses_what_eager_refuses(kind: str) -> None:
    model, x = Written(KINDS[kind]), torch.randn(8, 6)
    try:
        Written(KINDS[kind])(x).backward()
        refused = False
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        refused = True
    if not refused:
        trace(model, (x,))
        return
    with pytest.raises(CaptureError, match="changed in place that backward needs") as raised:
        trace(model, (x,))
    assert "test_saved_writes.py:" in str(raised.value).splitlines()[0]


def test_both_answers_occur() -> None:
    """So that the comparison above compares."""
    refused = []
    for kind, write in KINDS.items():
        try:
            trace(Written(write), (torch.randn(8, 6),))
        except CaptureError:
            refused.append(kind)
    assert 5 <= len(refused) <= len(KINDS) - 5
