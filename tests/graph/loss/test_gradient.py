"""A loss that trains nothing is refused by `compile`, with the line that cuts its gradient off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CaptureError
from penstock.tests.shown_elsewhere import slow_but


class Model(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x), x)


def compile_job(loss: Callable[[Tensor, Tensor], Tensor], precision: str = "fp32") -> penstock.Job:
    return penstock.compile(Model(loss), "cpu-only", example_inputs=torch.randn(4, 4), precision=precision)


def detached(h: Tensor, x: Tensor) -> Tensor:
    h = h.detach()  # the line to blame
    return h.sum()


def without_gradients(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        g = h.tanh()  # the line to blame
    return g.sum()


def through_integers(h: Tensor, x: Tensor) -> Tensor:
    return h.argmax(1).float().sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (detached, "# the line to blame\n  the loss has no gradient: this line cuts it off"),
        (without_gradients, "# the line to blame\n  the loss has no gradient: this line cuts it off"),
        (through_integers, "or an operation that has no gradient"),
        (lambda h, x: (h > 0).sum(), "the loss is int64"),
        (lambda h, x: (h > 0).all(), "the loss is bool"),
        (lambda h, x: torch.ones(()), "no trained parameter reaches it"),
        (lambda h, x: x.sum(), "no trained parameter reaches it"),
        (lambda h, x: torch.view_as_complex(h.view(-1, 2)).sum(), "the loss is complex64"),
    ],
)
def test_a_loss_without_gradient_is_refused(loss: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        compile_job(loss)
    assert message in str(caught.value)


def written_in_place(h: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros(4, 4)
    made[1:][0] = h[0]
    return made.sum()


def with_a_detached_part(h: Tensor, x: Tensor) -> Tensor:
    return (h - h.detach().mean()).square().mean()


@pytest.mark.parametrize("loss", [written_in_place, with_a_detached_part])
@pytest.mark.parametrize("precision", slow_but(["bf16"], ["fp32", "bf16"]))
def test_a_gradient_is_followed_through_writes_in_place(loss: Callable[..., Tensor], precision: str) -> None:
    compile_job(loss, precision)
