"""Exchanges of a team's members count in lower bounds and in the estimates that give the order of tries."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.search.candidate import PLAIN, Candidate
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.team_estimate import TeamEstimator, every_layout
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Options
from penstock.passes.sharding.mesh import Mesh
from penstock.tests.graph.divide.mixtures import WIDTH, Mixture
from penstock.tests.passes.running import traced_model

ROWS, TOKENS = 4, 16
END = "partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"
WAYS = ("split-width{team=2}", "split-context{by=rows, team=2}", "split-context{by=heads, team=2}",
        "split-context{by=ring, team=2}")  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Any:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return traced_model(Mixture(inner=64), [{"ids": ids, "labels": ids}])[0]


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_exchanges_bound_a_step_over_slow_links(graph: Any, way: str) -> None:
    """Of links that are slower than all else, the bound is nearly the step; it is never above it."""
    for link, share in (("2GB/s", 0.0), ("300kB/s", 0.8)):
        machine = Hardware.cpu(2, memory="64MB", dram="1GB", link=link)
        compiler = CandidateCompiler(graph, machine, Options(micro_batches=2))
        placed = compiler.place(Candidate.parse(f"{way}, coarsen, mesh, {END}", 2))
        bound, step_s = placed.bound(), compiler.finish(placed).step_s
        assert share * step_s < bound.seconds <= step_s * (1 + 1e-9), (way, link, bound, step_s)


def test_estimates_order_teams_by_links_and_memory(graph: Any) -> None:
    """Over slow links a team loses to itself in a pipeline, which sends less; where weights come over a slow link to
    DRAM, a team that divides them wins."""

    def of(rows: str, h2d: str, memory: str) -> TeamEstimator:
        machine = Hardware.cpu(4, memory=memory, dram="1GB", link=rows, h2d=h2d, d2h=h2d)
        return TeamEstimator(CandidateCompiler(graph, machine, Options(micro_batches=2)).lane(PLAIN))

    slow, fast = of("1MB/s", "2GB/s", "64MB"), of("2GB/s", "2GB/s", "64MB")
    whole, piped = (2, Mesh(), 2), (2, Mesh(depth=2), 2)
    for width in (True, False):
        assert slow.step_seconds(width, *whole) > 10 * fast.step_seconds(width, *whole)
        assert slow.step_seconds(width, 4, Mesh(), 2) > slow.step_seconds(width, *piped)
    rows_bytes = ROWS * TOKENS * WIDTH * 4 * 2  # of one expert of each token, as they enter and leave
    assert fast.routed_bytes(2) == pytest.approx(rows_bytes * 5 / 3) and fast.routed_bytes(4) == 2 * rows_bytes
    tight = of("2GB/s", "1MB/s", "80kB")
    assert tight.step_seconds(True, 4, Mesh(), 2) < tight.step_seconds(True, 1, Mesh(), 4)
    assert tight.step_seconds(True, 2, Mesh(shards=2), 2) < tight.step_seconds(True, 2, Mesh(), 2)


@pytest.mark.parametrize("width", [True, False])
def test_a_team_may_span_hosts(graph: Any, width: bool) -> None:
    """Every layout has a finite estimate, and a slower network makes a team over hosts slower."""

    def seconds(network: str, members: int) -> float:
        machine = Hardware.cpu(4, memory="64MB", dram="1GB", hosts=2, network=network)
        draft = CandidateCompiler(graph, machine, Options(micro_batches=2)).lane(PLAIN)
        return TeamEstimator(draft).step_seconds(width, members, Mesh(), 2)

    assert all(0 < seconds("1GB/s", members) < 1 for members in (1, 2, 4))
    assert seconds("1MB/s", 4) > 10 * seconds("1GB/s", 4)


def test_layouts_of_teams_divide_the_devices() -> None:
    found = list(every_layout(Hardware.cpu(4)))
    assert found == [
        (2, Mesh(depth=1)), (2, Mesh(shards=2, depth=1)), (2, Mesh(depth=2)), (4, Mesh(depth=1)),
    ]  # fmt: skip


class Wide(nn.Module):
    """One MLP, whose columns two members can share evenly and four cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 8190), nn.Linear(8190, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 4])
def test_width_is_chosen_where_rows_are_too_few_for_all_devices(rows: int) -> None:
    """And not looked at where each device may have a row of its own."""
    machine, batch = Hardware.cpu(4, memory="1GB", dram="1GB"), {"x": torch.zeros(rows, 256, 64)}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    plan = penstock.compile(Wide(), machine, example_inputs=batch, optimizer=optimizer, search_s=2.0).plan
    assert ("split-width" in plan.passes) == (rows == 2)
    assert any("split-width" in rival.name for rival in plan.rivals) == (rows == 2)


@pytest.mark.slow
def test_width_is_tried_with_shards_where_a_layer_takes_most_of_a_device() -> None:
    """Of 17 MB of weights, gradients and states a fourth fits each device: what a member of two has is shared by two
    teams. Theory sees that this may win; nothing is faster than what is chosen, which may have parts of layers."""
    machine = Hardware.cpu(4, memory="5MB", dram="1GB", h2d="20MB/s", d2h="20MB/s", link="2GB/s")
    options: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "search_s": 8.0}
    plan = penstock.compile(Wide(), machine, example_inputs={"x": torch.zeros(8, 64)}, **options).plan
    assert plan.predicted is not None
    assert any("split-width" in rival.passes and "shards=2" in rival.passes for rival in plan.rivals)
    assert plan.predicted.step_s <= min(r.step_s for r in plan.rivals if r.step_s is not None)
