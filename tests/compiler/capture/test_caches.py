"""Caches of the script hold nothing of a trace once `compile` has ended, also by an error."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError
from penstock.runtime.torch_names import FakeTensor
from penstock.tests.shown_elsewhere import slow_rows_but

TABLES: dict[int, Tensor] = {}


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size) / 4.0


def kept_table(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.arange(size) / 4.0
    return TABLES[size]


class Positions(torch.autograd.Function):
    """Adds a table that forward and backward keep at the class."""

    kept: dict[str, Tensor] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if "forward" not in Positions.kept:
            Positions.kept["forward"] = torch.arange(x.shape[-1]) / 4.0
        return x + Positions.kept["forward"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if "backward" not in Positions.kept:
            Positions.kept["backward"] = torch.ones(gradient.shape[-1])
        return gradient * Positions.kept["backward"]


class Momentum(torch.optim.Optimizer):
    """Keeps its factor, and a mask of each shape, in dictionaries of the class."""

    factors: dict[str, Tensor] = {}
    masks: dict[torch.Size, Tensor] = {}

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state, factor = self.state[param], self.factors.setdefault("factor", torch.tensor(0.5))
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(param)
                if param.shape not in self.masks:
                    self.masks[param.shape] = torch.ones_like(param)
                state["sum"].mul_(factor).add_(param.grad * self.masks[param.shape])
                param.add_(state["sum"], alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self, add: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.layer, self.add = nn.Linear(4, 4), add
        self.nested: dict[str, dict[int, Tensor]] = {"tables": {}}
        self.own = SimpleNamespace(table=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self, self.layer(x)).square().mean()


def keep_in_the_module(model: Any, h: Tensor) -> Tensor:
    tables = model.nested["tables"]
    if 4 not in tables:
        tables[4] = torch.arange(4) / 4.0
    return h + tables[4]


def keep_in_an_object_of_the_module(model: Any, h: Tensor) -> Tensor:
    if model.own.table is None:
        model.own.table = torch.arange(4) / 4.0
    return h + model.own.table


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dictionary": lambda model, h: h + kept_table(h.shape[-1]),
    "lru_cache": lambda model, h: h + table(h.shape[-1]),
    "autograd function": lambda model, h: Positions.apply(h),
    "module": keep_in_the_module,
    "object": keep_in_an_object_of_the_module,
    "size": lambda model, h: h + torch.arange(TABLES.setdefault(0, h.shape[-1])) / 4.0,
}


def fake_tensors() -> list[FakeTensor]:
    """All of this process."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, FakeTensor)]


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    for cache in (TABLES, Positions.kept, Momentum.factors, Momentum.masks):
        cache.clear()
    table.cache_clear()


def compile_model(model: nn.Module, micro_batches: int | str, **options: Any) -> Any:
    return penstock.compile(
        model, penstock.Hardware.cpu(1, memory="64MB"), strategy="balanced", micro_batches=micro_batches,
        **{"optimizer": partial(torch.optim.SGD, lr=0.1), "example_inputs": {"x": torch.zeros(4, 4)}, **options},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    slow_rows_but(
        [*((kind, "auto") for kind in KINDS), ("dictionary", 1)], [(kind, m) for kind in KINDS for m in (1, "auto")]
    ),
)
def test_a_model_works_on_after_compile(kind: str, micro_batches: int | str) -> None:
    """In eager, compiled again and evaluated, with the values of eager."""
    model, batch = Net(KINDS[kind]), {"x": torch.randn(4, 4)}
    with compile_model(model, micro_batches) as job:
        assert not any(isinstance(kept, FakeTensor) for cache in (TABLES, Positions.kept) for kept in cache.values())
        eager = model(**batch)
        eager.backward()
        torch.testing.assert_close(job.step(batch), eager.detach())
    with compile_model(model, micro_batches) as again:
        torch.testing.assert_close(again.evaluate(batch)["loss"], eager.detach())


def test_a_loss_function_keeps_nothing() -> None:
    model, batch = nn.Linear(4, 4), {"input": torch.randn(4, 4)}

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return (output + kept_table(4) + table(4)).square().mean()

    eager = loss_fn(model(**batch), batch)
    with compile_model(model, 1, loss_fn=loss_fn, example_inputs=batch) as job:
        torch.testing.assert_close(job.step(batch), eager.detach())
    torch.testing.assert_close(loss_fn(model(**batch), batch), eager)


def test_a_refused_model_keeps_nothing() -> None:
    def read(model: Any, h: Tensor) -> Tensor:
        return h + kept_table(4) + table(4) + float(h.sum())

    model = Net(read)
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        trace(model, {"x": torch.zeros(4, 4)})
    assert not TABLES
    assert table(4).tolist() == [0, 0.25, 0.5, 0.75]


def test_an_optimizer_keeps_nothing() -> None:
    """Its steps are tried on fake tensors, and on small real ones, which may stay."""
    model, batch = Net(KINDS["dictionary"]), {"x": torch.randn(4, 4)}
    with compile_model(model, 1, optimizer=Momentum) as job:
        kept = [*Momentum.factors.values(), *Momentum.masks.values()]
        assert kept and not any(isinstance(tensor, FakeTensor) for tensor in kept)
        job.step(batch)


def test_no_fake_tensor_is_left_anywhere() -> None:
    models, before = {kind: Net(add) for kind, add in KINDS.items()}, fake_tensors()
    for model in models.values():
        trace(model, {"x": torch.zeros(4, 4)})
    assert len(fake_tensors()) == len(before)


class Centred(nn.Module):
    """Keeps what it makes of the last mask, under that mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def weights(mask: Tensor) -> Tensor:
        return mask / mask.sum(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.weights(x.abs())).square().mean()


def test_a_cache_under_a_tensor_is_not_found_by_the_second_forward() -> None:
    model, batch = Centred(), {"x": torch.randn(4, 4)}
    with compile_model(model, 1) as job:
        assert float(job.step(batch)) == pytest.approx(float(model(**batch).detach()), rel=1e-6)
