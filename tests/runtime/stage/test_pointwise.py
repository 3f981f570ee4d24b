"""Pointwise results computed again in backward: gradients bit for bit, fewer bytes saved, nothing held afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.stage.pointwise import PointwiseAgain

WIDTH = 16
Forward = Callable[[nn.Linear, Tensor], Tensor]


def gelu(linear: nn.Linear, x: Tensor) -> Tensor:
    h = linear(x)
    return linear(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.044715 * torch.pow(h, 3.0)))))


def rms_norm(linear: nn.Linear, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    h = linear.weight[0] * wide.to(x.dtype)
    return linear(h) + linear(h)


def gate(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(F.silu(linear(x)) * linear(x + 1))


def rotate(linear: nn.Linear, x: Tensor) -> Tensor:
    h = linear(x)
    first, last = h[..., : WIDTH // 2], h[..., WIDTH // 2 :]
    return linear((h * 2 + torch.cat((-last, first), dim=-1) * 3).t().contiguous().t())


def drop(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(F.dropout(torch.sigmoid(linear(x)), 0.5) + x)


def change(linear: nn.Linear, x: Tensor) -> Tensor:
    """Both a result of which others were made, and one that waits for backward, are written in place."""
    h = linear(x)
    wide = torch.tanh(h * 2)
    h.add_(wide)
    other = torch.exp(h * 0.1)
    return linear(F.relu_(linear(wide * other))) + other.mul_(1).detach()


def seen_otherwise(linear: nn.Linear, x: Tensor) -> Tensor:
    h = torch.tanh(linear(x))
    bits = h.detach().view(torch.int16 if h.dtype == torch.bfloat16 else torch.int32)
    return linear(h.view(-1, WIDTH // 2).pow(2).view(h.shape)) * (bits > 0)


FORWARDS = [gelu, rms_norm, gate, rotate, drop, change, seen_otherwise]


def train(forward: Forward, dtype: torch.dtype, again: bool) -> tuple[list[Tensor], int]:
    """Output and gradients of one forward and backward, and the bytes that were saved beside input and weights."""
    torch.manual_seed(0)
    linear, x = nn.Linear(WIDTH, WIDTH).to(dtype), torch.randn(8, WIDTH, dtype=dtype, requires_grad=True)
    lasting = {t.untyped_storage().data_ptr() for t in linear.parameters()}
    saved: dict[int, int] = {}
    held: list[weakref.ref[Any]] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        if storage.data_ptr() not in lasting:
            held.append(weakref.ref(storage))
        return tensor.detach()

    hooks: AbstractContextManager[Any] = saved_tensors_hooks(pack, lambda t: t)
    if again:
        hooks = PointwiseAgain(pack, lambda t: t, lambda t: t.untyped_storage().data_ptr() in lasting)
    lasting.add(x.untyped_storage().data_ptr())
    with hooks:
        output = forward(linear, x)
    num_bytes = sum(size for storage, size in saved.items() if storage not in lasting)
    output.float().pow(2).sum().backward()
    found = [output.detach(), x.grad, *(p.grad for p in linear.parameters())]
    del output, x
    assert not any(storage() is not None for storage in held if storage() is not found[0].untyped_storage())
    return [t for t in found if t is not None], num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_are_bit_for_bit_those_of_saved_results(forward: Forward, dtype: torch.dtype) -> None:
    (plain, plain_bytes), (again, again_bytes) = (train(forward, dtype, again) for again in (False, True))
    assert len(plain) == len(again) == 4 and all(map(torch.equal, plain, again))
    assert again_bytes <= plain_bytes


def test_what_a_gelu_saves_is_its_input_alone() -> None:
    row_bytes = 8 * WIDTH * 4
    assert [train(gelu, torch.float32, again)[1] for again in (False, True)] == [5 * row_bytes, row_bytes]


STEPS: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "linear": lambda linear, x, first: linear(x),
    "tanh": lambda linear, x, first: torch.tanh(x),
    "square": lambda linear, x, first: x * x,
    "residual": lambda linear, x, first: x + first,
    "product": lambda linear, x, first: x * first,
    "cast": lambda linear, x, first: (x.float() * 1.5).to(x.dtype),
    "transposed": lambda linear, x, first: (x.t().contiguous() * 0.5).t(),
    "norm": lambda linear, x, first: F.layer_norm(x, (WIDTH,)),
    "dropout": lambda linear, x, first: F.dropout(x, 0.3),
    "in place": lambda linear, x, first: (x * 1.25).add_(first),
    "relu": lambda linear, x, first: F.relu_(linear(x)),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=10), st.booleans())
def test_any_chain_trains_the_same_and_saves_no_more(steps: list[str], low: bool) -> None:
    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        value = x
        for step in steps:
            value = STEPS[step](linear, value, x)
        return linear(value)

    dtype = torch.bfloat16 if low else torch.float32
    (plain, plain_bytes), (again, again_bytes) = (train(forward, dtype, again) for again in (False, True))
    torch.testing.assert_close(again, plain, rtol=0, atol=0, equal_nan=True)  # products of products may overflow
    assert again_bytes <= plain_bytes
