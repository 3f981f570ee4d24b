"""Forward may change the batch in place: a job changes a copy, says so, and trains as eager on a fresh batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.ir.errors import CaptureError
from penstock.tests.shown_elsewhere import slow_rows_but


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.layer, self.change = nn.Linear(6, 6), change

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.change(x, mask)
        return self.layer(x).masked_fill(mask, 0.5).square().mean()


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, mask: x.mul_(2),
    "slice": lambda x, mask: x[:, 0].fill_(0.3),
    "view": lambda x, mask: x.view(-1).add_(1),
    "by its mean": lambda x, mask: x.sub_(x.mean(-1, keepdim=True)),
    "mask": lambda x, mask: mask[:, 1].logical_not_(),
    "one by the other": lambda x, mask: x.masked_fill_(mask, 2.0),
    "inplace function": lambda x, mask: F.relu(x, inplace=True),
}


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    slow_rows_but([*((kind, 2) for kind in CHANGES), ("product", 1)], [(kind, m) for kind in CHANGES for m in (1, 2)]),
)
def test_a_batch_that_forward_changes(kind: str, micro_batches: int) -> None:
    model = Net(CHANGES[kind])
    batch = {"x": torch.randn(4, 6), "mask": torch.rand(4, 6) < 0.3}
    before, eager = copy.deepcopy(batch), copy.deepcopy(model)
    loss = eager(**copy.deepcopy(batch))
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    hardware, sgd = penstock.Hardware.cpu(1, memory="64MB"), partial(torch.optim.SGD, lr=0.1)
    with pytest.warns(UserWarning, match="of the batch in place .*changes a copy"):
        job = penstock.compile(
            model, hardware, example_inputs=batch, optimizer=sgd, strategy="balanced", micro_batches=micro_batches
        )
    with job:
        torch.testing.assert_close(job.step(batch), loss.detach())
        state = job.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value)
    assert all(torch.equal(batch[name], before[name]) for name in batch)


TEACHER = nn.Linear(4, 3)


def distil(output: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        wanted = TEACHER(batch["input"]).softmax(-1)
    return F.kl_div(output.log_softmax(-1), wanted, reduction="batchmean")


def test_a_teacher_under_no_grad_is_constant() -> None:
    model, batch = nn.Linear(4, 3), {"input": torch.randn(4, 4)}
    eager = copy.deepcopy(model)
    loss = distil(eager(**batch), batch)
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    with penstock.compile(
        model, penstock.Hardware.cpu(1, memory="64MB"), example_inputs=batch, loss_fn=distil, strategy="balanced",
        optimizer=partial(torch.optim.SGD, lr=0.1), micro_batches=1,
    ) as job:  # fmt: skip
        torch.testing.assert_close(job.step(batch), loss.detach())
        torch.testing.assert_close(job.state_dict()["weight"], eager.weight.detach())
    assert TEACHER.weight.requires_grad


def test_a_teacher_with_gradients_is_refused_with_a_way_out() -> None:
    """Also where it was used under `no_grad` before."""

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return distil(output, batch) + (output - TEACHER(batch["input"])).square().mean()

    with pytest.raises(CaptureError, match=r"not registered in the model.*teacher\.requires_grad_"):
        penstock.compile(
            nn.Linear(4, 3), "laptop-16gb", example_inputs={"input": torch.randn(4, 4)}, loss_fn=loss_fn
        )  # fmt: skip
