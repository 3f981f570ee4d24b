"""Gradient hooks are traced once and do then what they do in eager, or are refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.gradient_hooks import hooks_of, trace_hooks
from penstock.errors import CaptureError
from penstock.runtime.optimizer.hooks import call_hooks

MASK, HALF = torch.ones(5, 4), torch.tensor(0.5)
LOG: list[Any] = []


class Owner:
    """A hook may be a method, or an object."""

    def __init__(self) -> None:
        self.scale, self.count = 0.25, 0

    def scaled(self, g: Tensor) -> Tensor:
        return g * self.scale

    def counting(self, g: Tensor) -> Tensor:
        self.count += 1
        return g * 0.5

    def __call__(self, g: Tensor) -> Tensor:
        return g.clamp(-self.scale, self.scale)


def in_place(g: Tensor) -> None:
    g.mul_(2).clamp_(-1, 1)


def through_data(g: Tensor) -> None:
    g.data.clamp_(-0.1, 0.1)


def halves(p: Tensor) -> None:
    p.grad.mul_(0.5)


def replaces(p: Tensor) -> None:
    p.grad = p.grad.sign()


def through_another_dtype(g: Tensor) -> Tensor:
    return (g.double() * 3).to(g.dtype)


HONOURED: dict[str, Callable[..., Any]] = {
    "scaled": lambda g: g * 0.5,
    "clamped": lambda g: g.clamp(-1, 1),
    "by a tensor of one number": lambda g: g * HALF + torch.tensor(2.0),
    "where": lambda g: torch.where(g > 0, g, 0.1 * g),
    "masked": lambda g: g.masked_fill(g.abs() > 1, 0.0),
    "zeros": torch.zeros_like,
    "nan": lambda g: torch.nan_to_num(g, nan=0.0),
    "long": lambda g: -g.abs().sqrt().tanh() + 1,
    "partial": partial(torch.mul, other=3.0),
    "method": Owner().scaled,
    "object": Owner(),
    "another dtype": through_another_dtype,
    "in place": in_place,
    "through data": through_data,
    "after accumulation": halves,
    "after accumulation, another tensor": replaces,
}


def register(param: nn.Parameter, hook: Callable[..., Any]) -> None:
    later = hook in (halves, replaces, takes_away)
    (param.register_post_accumulate_grad_hook if later else param.register_hook)(hook)


def takes_away(p: Tensor) -> None:
    p.grad = None


@pytest.mark.parametrize(
    "names", [[name] for name in HONOURED] + [["scaled", "where", "in place", "after accumulation"]]
)
def test_a_traced_hook_does_what_it_does_in_eager(names: list[str]) -> None:
    param, factor = nn.Parameter(torch.zeros(5, 4)), torch.randn(5, 4) * 2
    for name in names:
        register(param, HONOURED[name])
    calls = trace_hooks("weight", param)
    (param * factor).sum().backward()
    assert param.grad is not None and call_hooks(calls, factor).equal(param.grad)
    assert call_hooks(calls, factor[2]).equal(param.grad[2])  # on a piece as well


def logs(g: Tensor) -> Tensor:
    LOG.append(1)
    return g * 2


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "by its norm": (lambda g: g / g.norm(), "linalg_vector_norm.default, which is not element-wise"),
    "a mask": (lambda g: g * MASK, r"a tensor of shape \[5, 4\] that is not the gradient"),
    "a row": (lambda g: g[0], "select.int, which is not element-wise"),
    "transposed": (lambda g: g.t(), "not element-wise"),
    "a branch": (lambda g: g if g.max() > 0 else -g, "max.default, which is not element-wise"),
    "random": (lambda g: g + torch.randn_like(g), "randn_like.default, which is not element-wise"),
    "observing": (lambda g: None, "something else than to change the gradient"),
    "handing through": (lambda g: g, "something else than to change the gradient"),
    "printing": (lambda g: print(g.sum()), "not element-wise"),
    "logging": (logs, "something else than to change the gradient"),
    "counting": (Owner().counting, "something else than to change the gradient"),
    "another dtype": (lambda g: g.double(), "which makes torch.float64"),
    "failing": (lambda g: {}["x"], "test_gradient_hooks.py.*\n.*fails on a gradient without values .KeyError"),
    "an optimizer": (takes_away, "takes the gradient away"),
    "something else": (lambda g: 1.0, "what is not made of the gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_could_do_is_refused_by_name(name: str) -> None:
    hook, reason = REFUSED[name]
    model = nn.Sequential(nn.Linear(4, 5))
    register(model[0].weight, hook)
    with pytest.raises(CaptureError, match=reason) as caught:
        hooks_of(model)
    assert "0.weight has the gradient hook" in str(caught.value) and "handle.remove()" in str(caught.value)


def test_hooks_of_frozen_parameters_never_run() -> None:
    model = nn.Linear(4, 5)
    model.weight.register_hook(lambda g: g.norm())
    model.weight.requires_grad_(False)
    assert hooks_of(model) == {}
