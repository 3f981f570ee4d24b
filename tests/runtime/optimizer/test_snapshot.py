"""Steps that are undone: parameters, states, numbers, groups and schedule are what they were, bit for bit."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from penstock.runtime.optimizer.param_groups import ParamGroup
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER, Counting, Replacing, name_of
from penstock.tests.shown_elsewhere import slow_but

CASES = {**EVERY_OPTIMIZER, "Replacing": Replacing, "Counting": Counting}
SHAPES: dict[str, tuple[int, ...]] = {"w": (6, 5), "b": (5,), "scale": ()}
SCHEDULERS = [
    partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20, cycle_momentum=False),
    partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5),
    partial(lr_scheduler.ExponentialLR, gamma=0.9),
]


def weights() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    if step == 0:
        del found["b"]
    return found


def poison() -> dict[str, Tensor]:
    return {name: torch.full(shape, math.nan) for name, shape in SHAPES.items()}


def places_for(spec: OptimizerSpec) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: torch.full(own, math.nan) for key, (own, _) in spec.state_shapes(shape, name).items()}
        for name, shape in SHAPES.items()
    }


def freeze(part: StageOptimizer) -> Any:
    """Everything that there is of it, copied."""
    assert part.optimizer is not None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
    schedule = None if part.scheduler is None else part.scheduler.state_dict()
    return copy.deepcopy(
        (part.params, {n: part.optimizer.state.get(p) for n, p in part.params.items()}, groups, schedule)
    )


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("placed", slow_but([True], [False, True]), ids=["own", "placed"])
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_returns_to_before_the_step(case: str, placed: bool) -> None:
    spec = OptimizerSpec.from_callable(CASES[case], SCHEDULERS[0])
    mine, plain = weights(), weights()
    part = StageOptimizer(spec, mine, places_for(spec) if placed else None)
    reference = StageOptimizer(spec, plain)
    snapshot = None
    for step in range(4):
        before = freeze(part)
        snapshot = part.snapshot(into=snapshot)
        part.step(poison())  # overwrites everything that a step can
        if step == 2:
            part.restore(snapshot)  # and once more from the same snapshot
            part.step(poison())
        part.restore(snapshot)
        assert_same(freeze(part), before)
        part.step(gradients(step))
        reference.step(gradients(step))
        for name, want in plain.items():
            assert torch.equal(mine[name], want), (step, name)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=name_of)
def test_every_schedule_returns(scheduler: Any) -> None:
    groups = (ParamGroup(("b",), {"lr": 0.5}), ParamGroup())
    spec = OptimizerSpec.from_callable(partial(torch.optim.SGD, lr=0.1, momentum=0.9), scheduler)
    spec = OptimizerSpec(spec.path, spec.kwargs, spec.scheduler_path, spec.scheduler_kwargs, groups)
    part = StageOptimizer(spec, weights())
    for step in range(5):
        before, snapshot = freeze(part), part.snapshot()
        part.step(gradients(step))
        after = freeze(part)
        part.restore(snapshot)
        assert_same(freeze(part), before)
        part.step(gradients(step))
        assert_same(freeze(part), after)


@pytest.mark.parametrize("case", ["AdamW-fused", "Adagrad-loop", "Replacing", "SGD-momentum-fused"])
def test_tensors_may_be_brought_back_by_others(case: str) -> None:
    """As from the other copy on SSD: into other places, after which only numbers are left to restore."""
    spec = OptimizerSpec.from_callable(CASES[case], SCHEDULERS[0])
    mine, plain = weights(), weights()
    part, reference = StageOptimizer(spec, mine, places_for(spec)), StageOptimizer(spec, plain)
    for step in range(4):
        disk = copy.deepcopy((part.places, mine))
        snapshot = part.snapshot(tensors=False)
        assert not snapshot.copies
        part.step(poison())
        places, mine = copy.deepcopy(disk)
        part.bind(places, mine)
        part.restore(snapshot)
        assert part.started == (step > 0)
        part.step(gradients(step))
        reference.step(gradients(step))
        for name, want in plain.items():
            assert torch.equal(mine[name], want), (step, name)


def test_a_snapshot_uses_the_memory_that_it_is_given() -> None:
    spec = OptimizerSpec.from_callable(torch.optim.AdamW)
    part = StageOptimizer(spec, {"a": torch.zeros(100, 3), "b": torch.zeros(7)})
    assert part.snapshot_bytes() == 3 * (1536 + 512)  # three of each, every one aligned to 512 bytes
    buffer = torch.zeros(part.snapshot_bytes(), dtype=torch.uint8)
    first = part.snapshot(into=buffer)
    places = [place.data_ptr() for row in first.copies.values() for place in row.values()]
    assert all(buffer.data_ptr() <= place < buffer.data_ptr() + buffer.nbytes for place in places)
    part.step({"a": torch.ones(100, 3)})
    again = part.snapshot(into=first)
    assert again is first
    assert [place.data_ptr() for row in again.copies.values() for place in row.values()] == places


def test_a_stage_without_parameters_has_nothing_to_keep() -> None:
    part = StageOptimizer(OptimizerSpec.from_callable(torch.optim.AdamW), {})
    part.restore(part.snapshot())
    assert part.snapshot_bytes() == 0 and not part.started
