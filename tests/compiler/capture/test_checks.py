"""The model's own checks of values, by `torch._check*` and by branches: made while capturing where that can be, else in
the programs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.capture.values import branches
from penstock.graph.opgraph import is_check
from penstock.ir.errors import CaptureError, WorkerError


class Checked(nn.Module):
    """Checks sizes, the batch alone, and what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        torch._check(x.shape[1] == 4)
        torch._check_is_size(x.shape[0])
        torch._check_tensor_all_with(ValueError, kept.sum() == 3, lambda: f"kept {kept.sum()}, not 3")
        h = self.layers[0](x)
        torch._check_tensor_all(h.abs() < 100)
        return (self.layers[1](h) * kept[:, None]).square().mean()


def batch_of(scale: float = 1.0, kept: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 4) * scale, "kept": torch.arange(4) < kept}


def compile_job(num_devices: int = 1) -> penstock.Job:
    torch.manual_seed(0)
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="64MB", dram="1GB")
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "strategy": "balanced"}
    return penstock.compile(Checked(), hardware, example_inputs=batch_of(), micro_batches=1, **options)


def test_checks_of_values_stay_in_the_graph_in_both_modes() -> None:
    graph = trace(Checked(), batch_of())
    assert sum(map(is_check, graph.nodes)) == 2 and graph.eval_error is None
    graph.module(**batch_of())
    with pytest.raises(RuntimeError, match=r"ValueError: kept <int64\[\]>, not 3"):
        graph.module(**batch_of(kept=4))


def test_each_check_is_in_one_stage() -> None:
    job = compile_job(num_devices=2)
    texts = [job.code(device).count("torch._assert_async(") for device in range(2)]
    assert sum(texts) == 2


@pytest.mark.parametrize(("batch", "said"), [(batch_of(kept=2), "not 3"), (batch_of(scale=1e4), "h.abs")])
def test_a_batch_that_fails_a_check_is_an_error_with_the_models_words(batch: Any, said: str) -> None:
    with compile_job() as job:
        job.step(batch_of())
        with pytest.raises(WorkerError, match=said):
            job.step(batch)


def test_a_check_of_sizes_fails_while_capturing() -> None:
    with pytest.raises(CaptureError, match=r"test_checks\.py:.*x\.shape\[1\]"):
        trace(Checked(), {"x": torch.zeros(4, 3), "kept": torch.ones(4, dtype=torch.bool)})


def is_large(x: Tensor) -> bool:
    return bool((x > 100).any())


def is_small(x: Tensor) -> bool:
    return not is_large(x)


def checks_by_branches(x: Tensor, h: Tensor) -> Tensor:
    if (x > 100).any():
        raise ValueError(f"found {x.max().item()}")
    if not (x < 100).all():
        raise ValueError
    assert (x < 100).all(), "too large"
    if is_large(x):
        raise ValueError
    if not is_small(x):
        raise ValueError
    if x.isnan().any() or x.min() < -100:
        raise TypeError("wrong")
    if not torch.isfinite(h).all():
        h = h.clamp(-10, 10)
    if torch.isinf(h).any():
        h = h.clamp(-10, 10)
    with torch.no_grad():
        if (h > 100).any():
            text = "and "
            text += "so" if x.shape[0] > 2 else "on"
            raise RuntimeError(text)
    if (x < 100).all():
        h = h * 2
    else:
        raise ValueError
    return h


class ByBranches(Checked):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return checks_by_branches(x, self.layers[0](x)).square().mean()


@pytest.fixture(params=["columns", "lines"])
def source_of_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are found in source by columns, and by lines alone, as before Python 3.11."""
    if request.param == "lines":
        monkeypatch.setattr(branches, "_calls_at", branches._calls_in_line)


@pytest.mark.usefixtures("source_of_calls")
def test_branches_of_which_one_way_raises_are_checks() -> None:
    model, batch = ByBranches(), batch_of()
    graph = trace(model, batch)
    assert sum(map(is_check, graph.nodes)) == 11 and graph.eval_error is None
    found = graph.module(**batch)["loss"]
    assert found == model(**batch)
    with pytest.raises(RuntimeError, match=r"ValueError in test_checks\.py:\d+: if \(x > 100\)\.any"):
        graph.module(**batch_of(scale=1e4))
    with pytest.raises(RuntimeError, match=r"not finite, .* in test_checks\.py:\d+: if not torch\.isfinite"):
        torch.nn.init.constant_(model.layers[0].weight, 3e38)
        graph.module(**batch)


class ByDistributions(Checked):
    """Checks that torch's own code makes, of what a layer gives and of the batch; torch.compile puts an end to those
    that nobody asks for."""

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mean, spread = self.layers[0](x).chunk(2, dim=1)
        given = torch.distributions.Normal(mean, spread.exp(), validate_args=True)
        flags = torch.distributions.Bernoulli(logits=mean, validate_args=True)
        return -given.log_prob(x[:, :2]).mean() - flags.log_prob((x[:, 2:] > 0).float()).mean()


def test_checks_of_distributions_are_checks() -> None:
    model, batch = ByDistributions(), batch_of()
    graph = trace(model, batch).module
    assert fx.Interpreter(graph).run(*batch.values())["loss"] == model(**batch)
    torch.nn.init.constant_(model.layers[0].weight, math.nan)
    with pytest.raises(ValueError, match="constraint"):
        model(**batch)
    with pytest.raises(RuntimeError, match=r"ValueError in test_checks\.py:\d+: given = torch\.distributions\.Normal"):
        fx.Interpreter(graph).run(*batch.values())


def catches(x: Tensor, h: Tensor) -> Tensor:
    try:
        if (x > 100).any():
            raise ValueError
    except ValueError:
        return -h
    return h


def goes_on_later(x: Tensor, h: Tensor) -> Tensor:
    if (x > 100).any() and (x < 200).all():
        raise ValueError
    return h


def asks_by_another(x: Tensor, h: Tensor) -> Tensor:
    if sum(map(is_large, x)) > 1:
        raise ValueError
    return h


def goes_on_by_a_function(x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if is_large(x) else h


def goes_on(x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if (x > 100).any() else h


def repeats(x: Tensor, h: Tensor) -> Tensor:
    while (h > 1).any():
        h = h / 2
    return h


@pytest.mark.usefixtures("source_of_calls")
@pytest.mark.parametrize("branch", [catches, goes_on_later, goes_on, asks_by_another, goes_on_by_a_function, repeats])
def test_a_branch_that_may_go_on_either_way_is_refused(branch: Any) -> None:
    class Branching(Checked):
        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return branch(x, self.layers[0](x)).square().mean()

    with pytest.raises(CaptureError, match=r"test_checks\.py:.*\n  this line needs the value of a tensor"):
        trace(Branching(), batch_of())


def test_numbers_may_overflow_in_fp16() -> None:
    with pytest.raises(CaptureError, match="isfinite"):
        trace(ByBranches(), batch_of(), autocast=torch.float16)
