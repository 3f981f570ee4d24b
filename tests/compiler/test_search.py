"""The search: what it tries, that it keeps the fastest, and what it says of the others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import penstock
from penstock.compiler import search as module
from penstock.compiler.plan import Plan
from penstock.compiler.candidates import micro_batch_counts, stage_counts
from penstock.compiler.trace import trace
from penstock.passes.base import Draft, Options
from penstock.passes.coarsen import Coarsen
from penstock.runtime.errors import DoesNotFit, PlanError
from penstock.tests.compiler.eager_baseline import SGD, zoo_case
from penstock.tests.zoo import zoo


def cpu(num_devices: int, memory: str = "64MB", **figures: Any) -> penstock.Hardware:
    return penstock.Hardware.cpu(num_devices=num_devices, memory=memory, **figures)


@pytest.mark.parametrize(
    ("batch", "devices", "usual", "last_resort"),
    [
        (8, 2, [2, 4, 8], []),
        (8, 1, [1, 2, 4], [8]),
        (64, 4, [4, 8, 16], [32, 64]),
        (6, 4, [3, 6], []),  # no divisor is 4: the nearest below
        (7, 5, [7], []),  # or above, if that is nearer
        (1, 8, [1], []),
    ],
)
def test_numbers_of_micro_batches(batch: int, devices: int, usual: list[int], last_resort: list[int]) -> None:
    """As many as devices first, up to four times as many, the rest only in need; all divide the batch."""
    assert micro_batch_counts(batch, cpu(devices)) == (usual, last_resort)


def test_numbers_of_stages() -> None:
    """From the fewest that fit, in whole rounds over the devices, never more than blocks."""
    model, batch = zoo()["gpt2"](num_layers=6)
    graph = trace(model, batch)
    counts = {}
    for memory in ("64MB", "250kB", "1kB"):
        draft = Draft(graph, cpu(2, memory), Options(micro_batches=2))
        coarsen = Coarsen()
        coarsen.rewrite(draft, coarsen.plan(draft))
        counts[memory] = stage_counts(draft)
        assert counts[memory] == sorted(set(counts[memory])) and counts[memory][-1] <= len(draft.blocks)
    assert counts["64MB"][0] == 2 and {4, 6, 8} <= set(counts["64MB"])
    assert counts["250kB"][0] > 2
    assert counts["1kB"] == [len(draft.blocks)]  # nothing fits: the finest partition is still tried, to say by how much


@pytest.mark.parametrize("memory", ["250kB", pytest.param("64MB", marks=pytest.mark.slow)])
def test_no_rival_is_faster_in_the_simulator(memory: str) -> None:
    """Each rival is compiled again by itself and simulated: none beats the choice, and each took what it claims."""
    model, batch = zoo_case("gpt2")
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD}
    job = penstock.compile(model, cpu(2, memory), micro_batches=4, **options)
    assert job.plan.predicted is not None and job.plan.predicted.step_s == pytest.approx(job.simulate().step_s)
    rivals = [rival for rival in job.plan.rivals if rival.step_s is not None]
    assert len(rivals) >= 2
    for rival in rivals:
        stages, micro_batches = (int(part.split()[0]) for part in rival.name.split(", "))
        line = job.plan.passes.replace(
            f"partition-balanced{{stages={len(job.plan.decisions.stages)}}}", f"partition-balanced{{stages={stages}}}"
        )
        again = penstock.compile(model, cpu(2, memory), strategy=line, micro_batches=micro_batches, **options)
        assert again.simulate().step_s == pytest.approx(rival.step_s)
        assert again.simulate().step_s >= job.plan.predicted.step_s
        assert "slower" in rival.reason or "as fast" in rival.reason


def test_candidates_that_do_not_fit_are_listed_with_the_reason() -> None:
    model, batch = zoo_case("gpt2")
    plan = penstock.compile(model, cpu(1, "260kB"), example_inputs=batch, optimizer=SGD).plan
    missed = [rival for rival in plan.rivals if rival.step_s is None]
    assert missed and all("cpu0" in rival.reason or "needs" in rival.reason for rival in missed)


def test_the_first_of_equals_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer stages come first, so that equal times give the simpler plan."""
    model, batch = zoo_case("mlp")

    class Same:
        step_s = 1.0

        def __init__(self, timeline: Any):
            self.timeline = timeline

        def __getattr__(self, name: str) -> Any:
            return getattr(self.timeline, name)

    simulate = module.simulate
    monkeypatch.setattr(module, "simulate", lambda *args, **kwargs: Same(simulate(*args, **kwargs)))
    plan = penstock.compile(model, cpu(1), example_inputs=batch, optimizer=SGD).plan
    assert len(plan.decisions.stages) == 1 and plan.micro_batches == 1
    assert {rival.reason for rival in plan.rivals} == {"as fast, tried later"}


def test_enough_memory_for_everything_makes_the_plan_faster() -> None:
    model, batch = zoo_case("gpt2")
    step_s = [
        penstock.compile(model, cpu(2, m), example_inputs=batch, optimizer=SGD, micro_batches=4).simulate().step_s
        for m in ("240kB", "64MB")
    ]
    assert step_s[1] < step_s[0]


def test_a_model_without_anything_to_train() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.layer(x).mean()

    import torch

    with pytest.raises(PlanError, match="nothing to train"):
        penstock.compile(Frozen(), cpu(1), example_inputs={"x": torch.zeros(4, 2)})


def test_a_plan_is_replayed_without_a_search() -> None:
    model, batch = zoo_case("mlp")
    plan = penstock.compile(model, cpu(2), example_inputs=batch, optimizer=SGD).plan
    again: Plan = penstock.compile(model, cpu(2), example_inputs=batch, optimizer=SGD, plan=plan).plan
    assert again.hash == plan.hash and not again.rivals and plan.rivals


def test_the_nearest_miss_is_reported() -> None:
    """Of all candidates that miss, the one that misses by the fewest bytes: less with more memory."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    graph = trace(model, batch)
    missing_bytes = []
    for memory in ("100kB", "150kB"):
        with pytest.raises(DoesNotFit) as caught:
            module.search(lambda _: graph, cpu(2, memory), module.Wishes("auto", 4, 8, Options()))
        missing_bytes.append(caught.value.missing_bytes)
    assert missing_bytes[0] > missing_bytes[1] > 0
