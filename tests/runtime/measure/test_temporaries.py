"""The temporary memory of a step beside parameters, gradients and states: as measured on real tensors, no more than a
quarter less than counted."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.runtime.measure import temporaries
from penstock.runtime.measure.temporaries import Living, step_bytes
from penstock.runtime.optimizer import stage_optimizer
from penstock.runtime.optimizer.param_groups import ParamGroup
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER, KINDS, Replacing
from penstock.tests.shown_elsewhere import slow_but

CASES = {**EVERY_OPTIMIZER, "Muon": partial(torch.optim.Muon, lr=0.01), "Replacing": Replacing}
SHAPES = {"a": (96, 160), "b": (160, 96), "c": (40, 30), "d": (96, 160), "e": (64, 7)}
NUMEL = 96 * 160
# One of each form, and those whose steps hold the most.
TELLING = ("Adafactor-foreach", "AdamW-fused", "ASGD-foreach", "Rprop-loop", "SGD-momentum-fused", "Muon", "Replacing")


def spec_of(name: str) -> OptimizerSpec:
    made = CASES[name]
    return OptimizerSpec("torch.optim:Muon", {"lr": 0.01}) if name == "Muon" else OptimizerSpec.from_callable(made)


def rows(dtype: torch.dtype = torch.float32) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, shape, dtype) for name, shape in SHAPES.items()]


def found_bytes(spec: OptimizerSpec, dtype: torch.dtype = torch.float32) -> int:
    """Of eight steps on real tensors: some classes take another way after the first ones."""
    made = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}
    grads: dict[str, Tensor] = {name: torch.randn(p.shape, generator=made).to(dtype) for name, p in params.items()}
    spec.traits(torch.device("cpu"))  # which are found by stepping, too
    with Living(*params.values(), *grads.values()) as living:
        part = StageOptimizer(spec, params)
        for _ in range(8):
            part.step(grads)
    assert part.optimizer is not None
    return living.most_beside(part.optimizer)


def assert_counted(found: int, counted: int) -> None:
    assert found <= counted + 64 * len(SHAPES), (found, counted)
    assert counted <= 1.25 * found, (found, counted)


@pytest.mark.parametrize("portion", [1 << 26, 2 * NUMEL], ids=["one call", "portions"])
@pytest.mark.parametrize("name", slow_but(TELLING, CASES))
def test_a_step_takes_what_is_counted(name: str, portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stage_optimizer, temporaries):
        monkeypatch.setattr(module, "PORTION_ELEMENTS", portion)
    spec = spec_of(name)
    assert_counted(found_bytes(spec), step_bytes(spec, rows(), "cpu"))


def test_the_dtype_of_the_step_counts() -> None:
    spec = spec_of("NAdam-foreach")
    counted = step_bytes(spec, rows(torch.bfloat16), "cpu")
    assert 2 * counted == step_bytes(spec, rows(), "cpu")
    assert_counted(found_bytes(spec, torch.bfloat16), counted)


@pytest.mark.parametrize("name", slow_but(("Adafactor", "AdamW", "ASGD"), KINDS))
def test_each_device_has_its_own_form(name: str) -> None:
    """Where a class has no fused kernels, a GPU takes the foreach form; Adafactor alone is a loop everywhere."""
    spec, fused = OptimizerSpec.from_callable(KINDS[name]), f"{name}-fused" in EVERY_OPTIMIZER
    one = rows()[:1]
    on_gpu, on_host = (step_bytes(spec, one, kind) for kind in ("cuda", "cpu"))
    form = "fused" if fused else "loop" if name == "Adafactor" else "foreach"
    assert on_gpu == step_bytes(spec_of(f"{name}-{form}"), one, "cuda")
    assert on_host == step_bytes(spec_of(f"{name}-{'fused' if fused else 'loop'}"), one, "cpu")
    assert (on_gpu == 0) == (on_host == 0) == fused or name == "ASGD"


def test_groups_are_stepped_one_after_the_other() -> None:
    groups = (ParamGroup(("a", "b"), {}, "torch.optim:Muon", {"lr": 0.01}), ParamGroup(None))
    spec = OptimizerSpec("torch.optim:NAdam", {"foreach": True}, groups=groups)
    muon, nadam = OptimizerSpec("torch.optim:Muon"), OptimizerSpec("torch.optim:NAdam", {"foreach": True})
    each = step_bytes(muon, rows()[:2], "cpu"), step_bytes(nadam, rows()[2:], "cpu")
    assert step_bytes(spec, rows(), "cpu") == max(each)
    assert_counted(found_bytes(spec), max(each))


def test_many_large_parameters_are_counted_without_memory_by_one_trial() -> None:
    large = [(f"layer{index}", (16384, 65536), torch.float32) for index in range(200)]
    spec = OptimizerSpec("torch.optim:Adadelta", json.loads('{"lr": 0.123}'))
    before = temporaries._temporaries_of_group.cache_info().misses
    assert step_bytes(spec, large, "cuda") == 2 * 4 * 16384 * 65536  # of one parameter, which is more than a portion
    assert temporaries._temporaries_of_group.cache_info().misses == before + 1
