"""Products in float8 through the public API equal torchao's own layers in eager: losses, every gradient, weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.ir.precision import PRECISIONS, Precision
from penstock.tests.compiler.eager_baseline import assert_close
from penstock.tests.compiler.fleet_matrix import in_process, with_counts
from penstock.tests.compiler.plain_precision import Plain, upcasting
from penstock.tests.compiler.test_precision import MACHINE, SGD, placed

RECIPES = [name for name, row in PRECISIONS.items() if row.float8]
NEW = {"remat": "recompute-pointwise, coarsen", "plain": "coarsen"}


def converted(model: nn.Module, precision: str, layers: Collection[str]) -> nn.Module:
    """A copy of the model with torchao's own layers in place of these."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(Precision.of(precision).float8)
    config = dataclasses.replace(recipe, emulate=True)
    return convert_to_float8_training(
        copy.deepcopy(model), config=config, module_filter_fn=lambda _, path: path in layers
    )


def compile_job(model: nn.Module, batch: Any, precision: str, micro_batches: int = 2, **options: Any) -> penstock.Job:
    return penstock.compile(
        model, options.pop("hardware", MACHINE), example_inputs=batch, precision=precision,
        **{"optimizer": SGD, "micro_batches": micro_batches, "strategy": "balanced", **options},
    )  # fmt: skip


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("passes", ["coarsen", "recompute-pointwise, coarsen"])
def test_steps_equal_those_of_torchao_bit_for_bit(precision: str, passes: str) -> None:
    model, batch = upcasting()
    rest = "partition-balanced{stages=3}, map-round-robin, schedule-pipeline, insert-remat{always=true}"
    job = compile_job(model, batch, precision, strategy=f"{passes}, {rest}, insert-fetch{{swap=true}}, insert-optimizer")
    assert job.plan.precision == precision and set(job.plan.decisions.float8) == LAYERS
    plain = Plain(converted(model, precision, LAYERS), SGD, 2)
    machine, given = in_process(job, model), with_counts(job, batch)
    for _ in range(3):
        assert float(machine.step(given)["loss"]) == plain.step(batch)
        assert_close(machine.grads, plain.gradients, 0.0)
    assert_close(machine.weights(), {n: p.data for n, p in plain.masters.items()}, 0.0)


LAYERS = {f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")}


@pytest.mark.parametrize("place", ["one device", "weights in DRAM", "states on SSD", "two devices", "split backwards"])
def test_every_place_computes_the_same(place: str) -> None:
    model, batch = upcasting()
    plain, job = Plain(converted(model, "fp8-rowwise", LAYERS), SGD, 4), placed(model, batch, "fp8-rowwise", place)
    machine, given = in_process(job, model), with_counts(job, batch)
    for _ in range(3):
        assert float(machine.step(given)["loss"]) == plain.step(batch)
        assert_close(machine.grads, plain.gradients, 0.0)
    assert_close(machine.weights(), {n: p.data for n, p in plain.masters.items()}, 0.0)
