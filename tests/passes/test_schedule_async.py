"""`schedule-async`: training bit for bit that of a sequential loop with the same versions, orders, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from penstock.passes.base import Draft
from penstock.passes.schedule_async import ScheduleAsync
from penstock.runtime.hardware import Hardware
from penstock.runtime.verify_versions import readings
from penstock.tests.passes.running import apply, draft_of, joined, reference, to_schedule, traced
from penstock.tests.passes.sequential import Sequential

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def asynchronous(graph: Any, weights: str = "current", devices: int = 2, **options: Any) -> Draft:
    draft = draft_of(graph, Hardware.cpu(num_devices=devices), **options)
    return apply(draft, *to_schedule()[:3], ScheduleAsync(weights=weights), memory=True)


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("weights", ["current", "stash", "predict"])
@pytest.mark.parametrize(("name", "devices", "stages"), [("gpt2", 3, 4), ("t5", 2, 6)])
def test_it_trains_as_the_sequential_loop_does(
    name: str, devices: int, stages: int, weights: str, optimizer: Any
) -> None:
    """GPT-2 with tied weights, T5 with edges between stages that are no neighbours; dropout; two calls."""
    graph, batches = traced(name)
    draft = asynchronous(graph, weights, devices, micro_batches=6, stages=stages)
    machine, loop = reference(draft, optimizer), Sequential(draft, weights, optimizer)
    batches = [*batches, *batches]
    for _ in range(2):
        losses = machine.step(joined(batches))["results"]["loss"]
        assert torch.equal(torch.stack(losses), torch.stack(loop.step(batches)))
    for stage in loop.stages:
        for param, value in stage.names.items():
            found = machine.stage_weights[stage.spec.name][param]
            assert torch.equal(found, value), (stage.spec.name, param)
    assert_same_versions(draft, loop)


def assert_same_versions(draft: Draft, loop: Sequential) -> None:
    """Which versions the programs read, and the staleness that the plan states."""
    found = {key: row for program in draft.programs for key, row in readings(program).items()}
    stale: dict[str, int] = {}
    for stage in loop.stages:
        name = stage.spec.name
        for m in range(6):
            assert found[name, m].forward == max(0, m - stage.delay) if stage.optimizer else 0
            if stage.optimizer is not None:
                stale[name] = max(stale.get(name, 0), m - max(0, m - stage.delay))
    assert ScheduleAsync().plan(draft)["staleness"] == stale
