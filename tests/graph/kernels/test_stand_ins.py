"""Stand-ins of kernels, by which costs are measured: what models do with a kernel's result, they may do with these."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.graph.kernels.stand_ins import grouped_product


@pytest.mark.parametrize("width", [8, 6], ids=["whole rows", "padded rows"])
def test_a_grouped_product_may_be_changed_in_place(width: int) -> None:
    """As gpt-oss adds its experts' biases. Rows begin at multiples of 16 bytes."""
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, width, requires_grad=True)
    out = grouped_product(a, b, torch.tensor([1, 4], dtype=torch.int32))
    assert out.stride() == (8, 1) and out.shape == (4, width)
    out += 1.0
    out.sum().backward()
    assert a.grad is not None and a.grad.shape == a.shape and b.grad is not None and b.grad.shape == b.shape


def ctc_loss(output: Tensor, batch: Any, reduction: str) -> Tensor:
    rows, steps = output.shape[:2]
    targets = batch["targets"]
    lengths = (targets.shape[1],) * rows
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), targets, (steps,) * rows, lengths, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_losses_of_micro_batches_come_to_that_of_the_whole_batch(reduction: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 6), partial(ctc_loss, reduction=reduction)
    batch = {"input": torch.randn(4, 8, 4), "targets": torch.randint(1, 6, (4, 3))}
    twin = copy.deepcopy(model)
    hardware, sgd = penstock.Hardware.cpu(memory="64MB", dram="1GB"), partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"optimizer": sgd, "micro_batches": 2, "strategy": "balanced", "loss_fn": loss_fn}
    with penstock.compile(model, hardware, example_inputs=batch, **options) as job:
        loss, found = job.step(batch), job.state_dict()
    expected = loss_fn(twin(batch["input"]), batch)
    expected.backward()
    sgd(twin.parameters()).step()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, dict(twin.state_dict()), rtol=1e-5, atol=1e-6)
