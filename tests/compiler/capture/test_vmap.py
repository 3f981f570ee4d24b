"""Masks and other values without a gradient by `torch.vmap`: the graph has the ATen calls on whole batches that torch
makes of the function, and trains as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, vmap

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError
from penstock.tests.compiler.eager_baseline import assert_close

ROWS, TOKENS, WIDTH = 4, 6, 8
SGD = partial(torch.optim.SGD, lr=1.0)
PRODUCT = torch.linspace(-1, 1, TOKENS * TOKENS).reshape(TOKENS, TOKENS)
CONSTANT = torch.tensor([True, False, True, True, False, True])


class Net(nn.Module):
    """Attention of one head, under a mask of booleans [rows, queries, keys] that `mask` makes."""

    def __init__(self, mask: Callable[[Net, Tensor, Tensor], Tensor]):
        super().__init__()
        self.linear, self.scorer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Dropout(0.0)
        self.register_buffer("seen", torch.tensor([1, 0, 1, 1, 0, 1]))
        self.mask = mask

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.linear(x)
        mask = self.mask(self, x, kind) | torch.eye(x.shape[1], dtype=torch.bool)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).square().mean() + self.scorer(h).mean()


def batch_of(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, tokens, WIDTH), "kind": torch.randint(0, 3, (rows, tokens))}


def pair_mask(rule: Callable[..., Tensor], kind: Tensor) -> Tensor:
    """The mask of a rule of row, query and key, as transformers makes it."""
    rows, tokens = kind.shape
    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        rule = vmap(rule, in_dims=dims)
    return rule(torch.arange(rows), torch.arange(tokens), torch.arange(tokens))


def image_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    return pair_mask(lambda b, q, k: (q >= k) | ((kind[b, q] == 1) & (kind[b, k] == 1)), kind)


def score_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    with torch.no_grad():
        return vmap(lambda row: net.scorer(row)[:, 0] > row.mean())(x)[:, None]


MASKS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "images": image_mask,
    "a window": lambda net, x, kind: pair_mask(lambda b, q, k: (q >= k) & (q - k < 3), kind),
    "a buffer": lambda net, x, kind: pair_mask(lambda b, q, k: net.seen[k] > 0, kind),
    "a constant": lambda net, x, kind: pair_mask(lambda b, q, k: CONSTANT[q] & (kind[b, k] > 0), kind),
    "chunks": lambda net, x, kind: vmap(lambda row: row[:, None] == row, chunk_size=3)(kind),
    "no wrapper": lambda net, x, kind: vmap(lambda row: torch.ones(TOKENS, TOKENS).tril().bool())(kind),
    "two results": lambda net, x, kind: torch.logical_or(*vmap(lambda r: (r[:, None] == r, r[None] > 0))(kind)),
    "other dimensions": lambda net, x, kind: vmap(lambda c: c.cumsum(0) > 2, in_dims=1, out_dims=1)(kind)[:, None],
    "a module without a gradient": score_mask,
    "a derivative": lambda net, x, kind: vmap(torch.func.grad(lambda row: row.tanh().sum()))(x)[..., :1] > 0.5,
    "one-hot": lambda net, x, kind: vmap(lambda row: F.one_hot(row, 3).sum(0) > 1)(kind)[:, None, :1],
    "a product": lambda net, x, kind: vmap(lambda row: row.float() @ PRODUCT > 0)(kind)[:, None],
    "vectors": lambda net, x, kind: vmap(lambda row: row @ row)(kind.float())[:, None, None] > 2,
    "a dimension of one": lambda net, x, kind: vmap(lambda row: row[None].squeeze_(0) > 1)(kind)[:, None],
    "a number as a tensor": lambda net, x, kind: vmap(lambda row: row * torch.tensor(2.0) > 1)(kind)[:, None],
    "numbers as a tensor": lambda net, x, kind: vmap(lambda row: row > torch.tensor([0, 1, 2, 0, 1, 2]))(kind)[:, None],
    "sorted": lambda net, x, kind: vmap(lambda row: row.float().topk(2).values.min() < row)(kind)[:, None],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_graph_with_vmap_computes_what_eager_computes(mask: Callable[..., Tensor]) -> None:
    model, batch = Net(mask), batch_of()
    graph = trace(model, batch)
    assert not graph.eval_error
    losses, weights = (graph.module(**batch)["loss"], model(**batch)), (model.linear.weight, model.scorer.weight)
    found, wanted = (dict(zip("abc", (loss.detach(), *torch.autograd.grad(loss, weights)))) for loss in losses)
    assert_close(found, wanted, 1e-6)
    names = " ".join(str(node.target) for node in graph.nodes)
    assert "aten" in names and "vmap" not in names


def assert_trains_like_eager(
    model: nn.Module, num_devices: int, micro_batches: int | str, batches: list[dict[str, Tensor]], **options: Any
) -> int:
    """A step on each batch. Returns the number of micro-batches."""
    twin, hardware = copy.deepcopy(model), penstock.Hardware.cpu(num_devices, memory="256MB", dram="1GB")
    optimizer = SGD(twin.parameters())
    options = {"optimizer": SGD, "micro_batches": micro_batches, "strategy": "balanced", **options}
    with penstock.compile(model, hardware, example_inputs=batches[0], **options) as job:
        for batch in batches:
            optimizer.zero_grad()
            wanted = twin(**batch)
            wanted.backward()
            optimizer.step()
            assert_close({"loss": job.step(batch)}, {"loss": wanted.detach()}, 1e-6)
        assert_close(job.state_dict(), twin.state_dict(), 1e-6)
        return int(job.programs[0].interface.total_micro_batches)


SLOW = [pytest.mark.slow]
WAYS = [
    pytest.param(1, 1, marks=SLOW), (1, 2), pytest.param(1, "auto", marks=SLOW),
    *(pytest.param(2, count, marks=[pytest.mark.multi, *SLOW * (count != 2)]) for count in (1, 2, "auto")),
]  # fmt: skip


@pytest.mark.parametrize(("num_devices", "micro_batches"), WAYS)
def test_a_mask_of_images_and_text_trains_as_in_eager(num_devices: int, micro_batches: int | str) -> None:
    assert_trains_like_eager(Net(image_mask), num_devices, micro_batches, [batch_of(), batch_of()])


def test_the_printed_mask_needs_no_trust(tmp_path: Path) -> None:
    model, twin, batch = Net(image_mask), Net(image_mask), batch_of()
    twin.load_state_dict(model.state_dict())
    hardware = penstock.Hardware.cpu(1, memory="256MB", dram="1GB")
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=2, strategy="balanced")
    with job, penstock.load(job.write(tmp_path), twin) as loaded:
        assert torch.equal(loaded.step(batch), job.step(batch))


@pytest.mark.slow
def test_a_mask_by_vmap_in_batches_of_any_length() -> None:
    tokens = torch.export.Dim("tokens", min=3, max=9)
    batches = [batch_of(tokens=9), batch_of(tokens=4), batch_of(tokens=7)]
    assert_trains_like_eager(Net(image_mask), 1, 2, batches, dynamic_shapes={"x": {1: tokens}, "kind": {1: tokens}})


def random_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    return vmap(lambda row: torch.rand_like(row) > 0.5, randomness="different")(x[:, None, :, 0])


def inplace_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    return vmap(lambda row: row.clone().clamp_(0, 1) > 0)(kind)[:, None]


def outer_shape_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    """Changes the shape of a tensor that is not the function's own."""
    return vmap(lambda row: row.unsqueeze_(0)[0] > 0)(kind)[:, None]


def branch_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    return vmap(lambda row: row > 0 if row.sum() > 0 else row < 0)(kind)[:, None]


def trainable_mask(net: Net, x: Tensor, kind: Tensor) -> Tensor:
    return vmap(lambda row: net.scorer(row)[:, 0] > 0)(x)[:, None]


@pytest.mark.parametrize("mask", [random_mask, inplace_mask, outer_shape_mask, branch_mask, trainable_mask])
def test_what_vmap_cannot_be_recorded_for_is_refused_with_the_line(mask: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError) as error:
        trace(Net(mask), batch_of())
    first, *rest = str(error.value).splitlines()
    assert first.startswith("test_vmap.py:") and "vmap(lambda row" in first
    assert "torch.vmap" in rest[-1] and "where no gradient" in rest[-1] and "whole batches" in rest[-1]
