"""The search tries teams where rows are long, and nowhere else while something fits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.search.teams import LONG_TOKENS, team_meshes
from penstock.passes.decisions import TokenSplit
from penstock.passes.rewrite.split_context import SplitContext
from penstock.passes.sharding.mesh import Mesh
from penstock.tests.graph.divide.mixtures import Mixture
from penstock.tests.graph.divide.sequences import WIDTH, WORDS, Layer


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(WORDS, WIDTH), Layer(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.layer(self.embed(ids), torch.arange(ids.shape[1])[:, None] / 7.0)
        return {"loss": F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())}


def plan_for(tokens: int, **more: Any) -> Any:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "search_s": 20.0, **more}
    batch = {"ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return penstock.compile(Long(), penstock.Hardware.cpu(num_devices=2), example_inputs=batch, **options).plan


@pytest.mark.slow
def test_one_long_row_is_shared_by_all_devices() -> None:
    """Attention takes nearly all of the time, and each member does half of it."""
    plan = plan_for(LONG_TOKENS)
    assert plan.decisions.context is not None and plan.decisions.context.team == 2
    others = [rival for rival in plan.rivals if "split-context" not in rival.passes]
    alone = min(rival.step_s for rival in others if rival.step_s is not None)
    assert plan.predicted is not None and plan.predicted.step_s < 0.7 * alone
    assert plan.predicted.bound_s <= plan.predicted.step_s


@pytest.mark.slow
def test_no_row_is_divided_once_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To divide the layers of a model takes as long as a plan."""
    monkeypatch.setattr(SplitContext, "plan", lambda *_: pytest.fail("a graph is divided"))
    plan = plan_for(LONG_TOKENS, search_s=0.0, check=False)
    assert plan.predicted is not None
    assert "not tried: out of time" in {rival.reason for rival in plan.rivals}


@pytest.mark.slow
def test_short_rows_are_not_divided() -> None:
    plan = plan_for(64)
    assert plan.decisions.context is None
    assert not any("split-context" in rival.passes for rival in plan.rivals)


@pytest.mark.slow
def test_experts_are_shared_out_where_one_device_cannot_hold_them() -> None:
    """13 MB hold half of the experts with their gradients; all of them, or others in turn, would come over a slow
    link."""
    machine = penstock.Hardware.cpu(2, memory="13MB", dram="1GB", h2d="50MB/s", d2h="50MB/s", link="2GB/s")
    ids = torch.zeros(8, 8, dtype=torch.int64)
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "search_s": 8.0, "micro_batches": 4}
    model = Mixture(inner=8192)
    plan = penstock.compile(model, machine, example_inputs={"ids": ids, "labels": ids}, **options).plan
    assert plan.decisions.context == TokenSplit(team=2, by="rows", experts=["experts"])
    others = [rival.step_s for rival in plan.rivals if "split-context" not in rival.passes and rival.step_s is not None]
    assert plan.predicted is not None and 0 < plan.predicted.bound_s <= plan.predicted.step_s < min(others)


def test_teams_are_large_first_and_divide_the_devices() -> None:
    assert list(team_meshes(penstock.Hardware.cpu(num_devices=6))) == [
        (6, Mesh(shards=6)), (6, Mesh()), (3, Mesh(shards=6)), (3, Mesh()),
    ]  # fmt: skip
