"""A mixture's searched plan is at least as fast as each strategy by name that fits, in the simulator."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.options import JobOptions
from penstock.compiler.search.attempts import SearchResult, Wishes
from penstock.compiler.search.candidate import Candidate
from penstock.compiler.search.search import search
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import DoesNotFit, PassError, PlanError
from penstock.tests.graph.divide.mixtures import Mixture

SHAPES = {"qwen3-30b-a3b": {}, "mixtral-8x7b": {}, "deepseek-v3": {"ssd": "8x4TB"}}
MACHINES = {"rtx3090x8": {"dram": "1TB"}, "a100-80gbx8": {}, "h100x8": {}}
BY_NAME = [name for name in STRATEGIES if Candidate.parse(name, 8).is_synchronous]


def slower_than_named(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The strategies that are faster than the searched plan, with the seconds of their steps. What the search has tried
    itself is compared there; others are planned alone, over the graphs that it had."""
    asked: list[tuple[Any, penstock.Hardware, Wishes]] = []

    def noting(graphs: Any, machine: penstock.Hardware, wishes: Wishes) -> SearchResult:
        asked.append((graphs, machine, wishes))
        return search(graphs, machine, wishes)

    monkeypatch.setattr("penstock.compiler.api.search", noting)
    plan = JobOptions(**options).compile().plan
    assert plan.predicted is not None
    best_s = plan.predicted.step_s

    def step_s(strategy: str) -> float:
        graphs, machine, wishes = asked[0]
        try:
            alone = dataclasses.replace(wishes, asked=Candidate.parse(strategy, machine.num_devices))
            return search(graphs, machine, alone).best.step_s
        except (DoesNotFit, PassError, PlanError):
            return float("inf")

    rows = {rival.name.partition(",")[0]: rival for rival in plan.rivals if rival.name.partition(",")[0] in BY_NAME}
    known = {name: row for name, row in rows.items() if not row.reason.startswith("not tried")}
    found = {name: row.step_s for name, row in known.items() if row.step_s is not None}
    found |= {name: step_s(name) for name in BY_NAME if name not in known}
    return {name: seconds for name, seconds in found.items() if seconds < best_s * (1 - 1e-9)}


@pytest.mark.slow
def test_a_small_mixture_is_searched_no_slower_than_by_name() -> None:
    """Theory's favourites come first, and take no strategy's turn."""
    ids = torch.zeros(4, 8, dtype=torch.int64)
    options: dict[str, Any] = {"example_inputs": {"ids": ids, "labels": ids}, "micro_batches": 2}
    options["optimizer"] = partial(torch.optim.SGD, lr=0.1)
    machine = penstock.Hardware.cpu(2, memory="1MB", dram="1GB")
    plan = penstock.compile(Mixture(), machine, search_s=0.8, **options).plan
    assert plan.predicted is not None
    tried = {rival.name.partition(",")[0] for rival in plan.rivals if not rival.reason.startswith("not tried")}
    named = {"gpipe", "1f1b", "mobius", "data-parallel", "zero3-offload", "min-stage"}
    best = {name for name in named if Candidate.parse(name, 2).passes == Candidate.parse(plan.passes, 2).passes}
    assert named - best <= tried
    alone = penstock.compile(Mixture(), machine, strategy="1f1b", **options).plan.predicted
    assert alone is not None and plan.predicted.step_s <= alone.step_s


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", SHAPES)
def test_a_mixture_is_searched_no_slower_than_by_name(
    model: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: dict[str, Any] = {**MACHINES[machine], **SHAPES[model]}
    options = {"model": model, "hardware": [machine], "batch": 32, "sequence": 1024, "precision": "bf16-true"}
    assert slower_than_named({**options, **memories}, monkeypatch) == {}
