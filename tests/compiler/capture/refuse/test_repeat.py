"""A forward that does something else at its second call is refused; one that only keeps what it has computed is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError

CALLS = [0]  # a global variable, as a script may have one


class Remembering(nn.Module):
    """A model with places to remember things in; `function` is its forward."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.count, self.history, self.own = 0, [], SimpleNamespace(count=0)
        self.last, self.table = None, None
        self.generator, self.torch_generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def counts(model: Any, h: Tensor) -> Tensor:
    model.count += 1
    return h.sum()


def counts_and_uses(model: Any, h: Tensor) -> Tensor:
    model.count += 1
    return h.sum() * model.count


def appends(model: Any, h: Tensor) -> Tensor:
    model.history.append(len(model.history))
    return h.sum()


def counts_in_an_object(model: Any, h: Tensor) -> Tensor:
    model.own.count += 1
    return h.sum()


def toggles(model: Any, h: Tensor) -> Tensor:
    model.count = not model.count
    return h.sum()


def begins_otherwise(model: Any, h: Tensor) -> Tensor:
    if model.count == 0:
        model.count = 1
        return h.sum()
    return h.tanh().sum()


def counts_globally(model: Any, h: Tensor) -> Tensor:
    CALLS[0] += 1
    return h.sum() * CALLS[0]


def reads_the_clock(model: Any, h: Tensor) -> Tensor:
    return h.sum() * time.perf_counter()


def draws_from_a_generator_of_numpy(model: Any, h: Tensor) -> Tensor:
    return h.sum() * model.generator.random()


def draws_from_entropy(model: Any, h: Tensor) -> Tensor:
    return h.sum() * np.random.default_rng().random()


def keeps_a_batch(model: Any, h: Tensor) -> Tensor:
    last, model.last = model.last, h.detach()
    return (h if last is None else h - last).sum()


def keeps_random_numbers(model: Any, h: Tensor) -> Tensor:
    if model.table is None:
        model.table = torch.rand(4)
    return (h * model.table).sum()


def switches_gradients_once(model: Any, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(model.count > 0):
        g = h * 2
    model.count = 1
    return (g + h).sum()


REFUSED = {
    counts: "changes self.count of 'the model' (0, 1, 2) at every call",
    counts_and_uses: "mul is given 2, at first 1",
    appends: "self.history",
    counts_in_an_object: "self.own",
    toggles: "self.count",
    begins_otherwise: "the second forward calls tanh, the first sum",
    counts_globally: "mul is given",
    reads_the_clock: "the clock",
    draws_from_a_generator_of_numpy: "self.generator",
    draws_from_entropy: "mul is given",
    keeps_a_batch: "a tensor of its last call",
    keeps_random_numbers: "made where the recorder cannot see",
    switches_gradients_once: "under other modes",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_python_remembers_is_refused_with_a_way_out(function: Any) -> None:
    with pytest.raises(CaptureError, match="register_buffer") as caught:
        trace(Remembering(function), torch.randn(3, 4))
    assert REFUSED[function] in str(caught.value)
    assert "test_repeat.py:" in str(caught.value) or "at every call" in str(caught.value)


def test_the_way_out_works() -> None:
    def counts_in_a_buffer(model: Any, h: Tensor) -> Tensor:
        model.seen.add_(1)
        return h.sum() * model.seen.clone()

    def replaces_a_buffer(model: Any, h: Tensor) -> Tensor:
        model.seen = model.seen + 1
        return h.sum() * model.seen

    for function in (counts_in_a_buffer, replaces_a_buffer):
        graph = trace(Remembering(function), torch.randn(3, 4))
        assert any("updates_buffers" in node.meta for node in graph.nodes)


def test_a_cache_is_none_of_it() -> None:
    def keeps_a_table(model: Any, h: Tensor) -> Tensor:
        if model.count < 4:
            model.table, model.count = torch.arange(4.0).mul(2.0), 4
        model.last = h.mul(3.0)
        return (model.last * model.table.mul(3.0)).sum()

    model, x = Remembering(keeps_a_table), torch.randn(3, 4)
    graph = trace(model, x)
    assert model.table is None and model.count == 0
    torch.testing.assert_close(graph.module(x)["loss"], model(x))


def test_an_unregistered_tensor_that_forward_converts_and_keeps_is_a_cache() -> None:
    def keeps_places(model: Any, h: Tensor) -> Tensor:
        model.history[0] = model.history[0].to(h.device).long()
        return h[model.history[0]].sum()

    model, x = Remembering(keeps_places), torch.randn(3, 4)
    model.history = [torch.tensor([2, 0], dtype=torch.int32)]
    graph = trace(model, x)
    assert model.history[0].dtype == torch.int32
    torch.testing.assert_close(graph.module(x)["loss"], model(x))


@pytest.mark.parametrize(
    ("draw", "names"),
    [(random.random, "Python's random module"), (np.random.rand, "numpy.random"), (np.random.randn, "numpy.random")],
)
def test_draws_outside_torch_are_refused_and_undone(draw: Callable[[], float], names: str) -> None:
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(CaptureError, match=names):
        trace(Remembering(lambda model, h: h.sum() * float(draw())), torch.randn(3, 4))
    found = draw()
    random.seed(0)
    np.random.seed(0)
    assert draw() == found


def test_a_generator_of_ones_own_is_refused() -> None:
    def draws(model: Any, h: Tensor) -> Tensor:
        return (h * torch.rand(4, generator=model.torch_generator)).sum()

    with pytest.raises(CaptureError, match="Generator of its own"):
        trace(Remembering(draws), torch.randn(3, 4))


def local_function(factor: float) -> type[torch.autograd.Function]:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * factor

    return Scaled


def test_an_autograd_function_of_one_forward_is_refused_as_such() -> None:
    with pytest.raises(CaptureError) as error:
        trace(Remembering(lambda model, h: local_function(2.0).apply(h).sum()), torch.ones(2, 4))  # type: ignore[no-untyped-call]
    line, reason = str(error.value).splitlines()
    assert line.startswith("test_repeat.py:")
    assert "local_function.<locals>.Scaled is defined while forward runs" in reason and "clock" not in reason
    twice, thrice = local_function(2.0), local_function(3.0)  # the way out, for two of one name, too
    model = Remembering(lambda model, h: thrice.apply(twice.apply(h)).sum())  # type: ignore[no-untyped-call]
    graph = trace(model, x := torch.ones(2, 4))
    assert torch.equal(graph.module(x=x)["loss"], model(x))
