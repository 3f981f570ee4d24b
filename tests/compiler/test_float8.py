"""Products in float8 through the public API equal torchao's own layers in eager: losses, every gradient, weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.compiler.check.check import check
from penstock.compiler.check.eager import use_torchao_layers
from penstock.compiler.strategies import PIPELINE
from penstock.errors import PlanError
from penstock.ir.machine.call_mix import FP8
from penstock.ir.precision import PRECISIONS
from penstock.runtime.quantised import libraries
from penstock.tests.compiler.eager_baseline import assert_close
from penstock.tests.compiler.fleet_matrix import in_process, with_counts
from penstock.tests.compiler.plain_precision import Plain, upcasting
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.compiler.test_precision import SGD, compile_job, placed
from penstock.tests.shown_elsewhere import slow_but, slow_rows_but

NAMES = [name for name, row in PRECISIONS.items() if row.float8]
LAYERS = {f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")}


def plain_of(job: penstock.Job, model: nn.Module, micro_batches: int) -> Plain:
    """torchao's layers in eager, in place of those that the plan names."""
    return Plain(use_torchao_layers(copy.deepcopy(model), job.plan, "cpu"), SGD, micro_batches)


def assert_equal_steps(job: penstock.Job, plain: Plain, batch: Mapping[str, Tensor]) -> None:
    machine, given = in_process(job, job.model), with_counts(job, batch)
    for _ in range(3):
        assert float(machine.step(given)["loss"]) == plain.step(batch)
        assert_close(machine.grads, plain.gradients, 0.0)
    trained = {name: p.data for name, p in plain.masters.items() if name in plain.gradients}
    assert_close({name: t for name, t in machine.weights().items() if name in trained}, trained, 0.0)


AGAIN = "recompute-pointwise, coarsen"
CASES = [(name, passes) for name in NAMES for passes in ("coarsen", AGAIN)]


@pytest.mark.parametrize(("precision", "passes"), slow_rows_but(CASES[:1], CASES))
def test_steps_equal_those_of_torchao_bit_for_bit(precision: str, passes: str) -> None:
    """Stages, micro-batches, weights from DRAM, forwards that run again."""
    model, batch = upcasting()
    rest = "partition-balanced{stages=3}, map-round-robin, schedule-pipeline, insert-remat{always=true}"
    line = f"{passes}, {rest}, insert-fetch{{swap=true}}, insert-optimizer"
    job = compile_job(model, batch, precision, strategy=line)
    assert job.plan.precision == precision and set(job.plan.decisions.float8) == LAYERS
    assert_equal_steps(job, plain_of(job, model, 2), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ("one device", "weights in DRAM", "states on SSD", "two devices", "split backwards"),
)
def test_every_place_computes_the_same(place: str) -> None:
    model, batch = upcasting()
    job = placed(model, batch, "fp8-rowwise", place)
    assert_equal_steps(job, plain_of(job, model, 4), batch)


class Adapted(nn.Module):
    """A frozen layer of a size that float8 multiplies, with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 64).requires_grad_(False)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.out = nn.Linear(64, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.base(x) + self.b(self.a(x))))


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Adapted() for _ in range(2)), nn.Linear(32, 16).requires_grad_(False)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = features
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).float(), labels)}


def adapters() -> tuple[Adapters, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Adapters(), {"features": torch.randn(8, 32), "labels": torch.randint(0, 16, (8,))}


@pytest.mark.parametrize("precision", slow_but(NAMES[:1], NAMES))
def test_frozen_layers_are_in_float8_and_adapters_around_them_are_not(precision: str) -> None:
    model, batch = adapters()
    job = compile_job(model, batch, precision, strategy="mobius")
    assert job.plan.decisions.float8 == [f"layers.{i}.{name}" for i in range(2) for name in ("base", "out")]
    assert_equal_steps(job, plain_of(job, model, 2), batch)


@pytest.mark.parametrize(
    ("precision", "whole_prologue"),
    slow_rows_but([("fp8-rowwise", 5e-3)], [("fp8-rowwise", 5e-3), ("fp8-tensorwise", 5e-2)]),
)
def test_the_check_compares_with_the_same_layers(precision: str, whole_prologue: float) -> None:
    """Nothing differs from the same micro-batches. On whole batches eager scales by other values."""
    model, batch = upcasting()
    report = check(compile_job(model, batch, precision, 4), model, [batch] * 2)
    assert report.passed
    by_side = {(d.against, d.what): d.relative for d in report.differences}
    assert all(by_side["captured graph", what] == 0.0 for what in ("loss", "gradient", "weight"))
    assert 0.0 < by_side["model itself", "gradient"] < whole_prologue


def test_the_plan_says_what_is_in_float8() -> None:
    model, batch = upcasting()
    job = compile_job(model, batch, "fp8", strategy="balanced")
    assert job.plan.precision == "fp8-rowwise" and "use-float8" in job.plan.passes
    told = " ".join(reasons_of(job).split())
    assert "multiplied in float8: 3 of layers.*.up, 3 of layers.*.down" in told
    assert "emulated in fp32, as CPU devices have no float8" in told and "enter (its 16 x 6" in told
    again = compile_job(model, batch, "fp8", plan=job.plan, strategy="auto", micro_batches="auto")  # type: ignore[arg-type]
    assert again.plan.hash == job.plan.hash


def test_the_head_is_in_float8_if_that_is_asked_for() -> None:
    model, batch = adapters()
    job = compile_job(model, batch, "fp8", strategy=f"use-float8{{head=true}}, {PIPELINE}")
    assert "head" in job.plan.decisions.float8 and "use-float8{head=true}" in job.plan.passes
    assert_equal_steps(job, plain_of(job, model, 2), batch)


def plan_on(hardware: Any, precision: str = "fp8-rowwise") -> penstock.Plan:
    with torch.device("meta"):
        model = upcasting()[0]
    batch = {"features": {"shape": [8, 6], "dtype": "float32"}, "labels": {"shape": [8], "dtype": "int64"}}
    return penstock.compile(
        model, hardware, example_inputs=batch, precision=precision, optimizer=SGD, micro_batches=2, strategy="balanced"
    ).plan


@pytest.mark.parametrize("name", slow_but(["h100x8", "mi300x"], ["h100x8", "rtx4090x2", "mi300x", "l4"]))
def test_cards_with_float8_are_planned_for(name: str) -> None:
    assert plan_on(name).decisions.float8


def test_cards_without_float8_are_refused_with_what_they_have() -> None:
    said = 'precision="fp8-rowwise" needs products in float8, and gpu0 of {} has {}; the nearest is precision="{}"'
    with pytest.raises(PlanError) as error:
        plan_on("a100-80gb")
    assert said.format("a100-80gbx1", "fp32, fp16, bf16", "bf16-true") in str(error.value)
    with pytest.raises(PlanError, match='has fp32, fp16; the nearest is precision="fp16-mixed"'):
        plan_on("rtx2080ti", "fp8-tensorwise")
    machine = penstock.Hardware.preset("rtx4090x2")
    old = machine.devices[1].model_copy(
        update={"peak_flops": {name: rate for name, rate in machine.devices[1].peak_flops.items() if name != FP8}}
    )
    with pytest.raises(PlanError, match="gpu1 of rtx4090x2 has fp32, fp16, bf16"):
        plan_on(machine.model_copy(update={"devices": [machine.devices[0], old]}))


def test_chains_of_calls_are_kernels_beside_it_and_compiled_stages_are_refused() -> None:
    model, batch = adapters()
    job = compile_job(model, batch, "fp8", kernels="fused")
    assert "fuse-pointwise, use-float8, coarsen" in job.plan.passes
    assert_equal_steps(job, plain_of(job, model, 2), batch)
    with pytest.raises(PlanError, match=r'compile_stages=True with precision="fp8-rowwise".*Leave one of them out'):
        compile_job(model, batch, "fp8", compile_stages=True)


def test_without_torchao_it_is_refused_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(f"no module named {name}")

    no_spec = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(libraries, "importlib", SimpleNamespace(import_module=fail, util=no_spec))
    with pytest.raises(PlanError, match=r"products in float8 are torchao's.*pip install 'penstock\[torchao\]'"):
        plan_on("h100")
