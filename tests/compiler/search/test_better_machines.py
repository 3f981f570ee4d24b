"""A machine with more of something, a model of which less is trained, and a longer search are never worse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.compiler.search.attempts import Wishes
from penstock.compiler.search.bounds import ideal_bounds, machine_bound
from penstock.compiler.search.candidate import PLAIN
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.search import search
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Options

ROWS = 4
SLACK = 1 + 1e-9  # of sums in another order


class Layers(nn.Module):
    """Linear layers of these widths, of which the first `frozen` are not trained."""

    def __init__(self, widths: tuple[int, ...], frozen: int):
        super().__init__()
        pairs = zip((16, *widths), widths)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def graph_of(widths: tuple[int, ...], frozen: int = 0) -> OpGraph:
    return trace(Layers(widths, frozen), {"x": torch.randn(64, 16)})


WIDTHS = st.lists(st.sampled_from([32, 64, 256, 512]), min_size=2, max_size=5).map(tuple)
MACHINE = Hardware.cpu(2, memory="4500kB", dram="32MB", h2d="1GB/s", d2h="1GB/s", link="1GB/s")
BETTER: dict[str, dict[str, Any]] = {
    "more memory": {"memory": "6MB"}, "far more memory": {"memory": "64MB"}, "more DRAM": {"dram": "64MB"},
    "faster links": {"h2d_bandwidth": "4GB/s", "d2h_bandwidth": "4GB/s", "root_complex_bandwidth": "8GB/s"},
    "one more device": {"num_devices": 3}, "twice the devices": {"num_devices": 4},
}  # fmt: skip


def bounds_of(graph: OpGraph, hardware: Hardware) -> tuple[float, float, float]:
    """The bounds of any kernels, of fused ones and of those of calls."""
    draft = CandidateCompiler(graph, hardware, Options(micro_batches=ROWS)).place(PLAIN).draft
    fused_s, least = ideal_bounds(draft)
    return least.seconds, fused_s, machine_bound(draft).seconds


@pytest.mark.slow
@settings(max_examples=6)
@given(widths=WIDTHS, frozen=st.integers(0, 1))
def test_bounds_of_better_machines_are_no_higher(widths: tuple[int, ...], frozen: int) -> None:
    """Nor is that of fewer kernels above that of more, or that of a model of which less is trained."""
    graph = graph_of(widths, frozen)
    usual = MACHINE.with_(memory="64MB")
    own = bounds_of(graph, usual)
    assert 0 < own[0] <= own[1] * SLACK <= own[2] * SLACK**2
    for changes in BETTER.values():
        if "memory" not in changes:
            for better_s, own_s in zip(bounds_of(graph, usual.with_(**changes)), own):
                assert better_s <= own_s * SLACK, changes
    for less_s, all_s in zip(own, bounds_of(graph_of(widths), usual)):
        assert less_s <= all_s * SLACK


def step_of(graph: OpGraph, hardware: Hardware, search_s: float = 4.0) -> float:
    """The simulated step of the plan that a search finds."""
    wishes = Wishes(None, ROWS, ROWS, Options(), search_s=search_s)
    return search(lambda count: graph, hardware, wishes).best.step_s


CASES = [(64, 512, 512, 64), (256, 256, 256, 256)]


@pytest.mark.slow
@pytest.mark.parametrize("better", BETTER)
@pytest.mark.parametrize("widths", CASES)
def test_the_plan_of_a_better_machine_is_no_slower(widths: tuple[int, ...], better: str) -> None:
    graph = graph_of(widths)
    assert step_of(graph, MACHINE.with_(**BETTER[better])) <= step_of(graph, MACHINE) * SLACK


@pytest.mark.slow
@pytest.mark.parametrize("widths", CASES)
def test_a_model_of_which_less_is_trained_is_no_slower(widths: tuple[int, ...]) -> None:
    assert step_of(graph_of(widths, 2), MACHINE) <= step_of(graph_of(widths), MACHINE) * SLACK


@pytest.mark.slow
@pytest.mark.parametrize("widths", CASES)
def test_a_longer_search_is_no_worse(widths: tuple[int, ...]) -> None:
    graph = graph_of(widths)
    steps = [step_of(graph, MACHINE, search_s) for search_s in (0.0, 0.1, 0.4, 1.6)]
    assert steps == sorted(steps, reverse=True) and steps[-1] < steps[0]
