"""CUDA graphs as they are planned: what they count, and what is refused. Training: tests/gpu/test_gpu_graphs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.report.graphs import graphs_text
from penstock.compiler.strategies import PIPELINE
from penstock.ir import ops
from penstock.ir.errors import PlanError
from penstock.ir.program import (
    graph_bytes,
    graphs_of_stages,
    parse_program,
    persistent_bytes,
    print_program,
    profile_memory,
    reasons_without_graphs,
)
from penstock.ir.program.graphs import PRODUCTS_BYTES, SEGMENTS_BYTES
from penstock.ir.stages.stage import aligned
from penstock.tests.ir.program.handmade import pipeline

ROWS, MICRO_BATCHES = 8, 4


class Half(nn.Module):
    """Layers of which the last ones drop."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
        self.last = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean()


def job_of(model: nn.Module | None = None, stages: int = 2, **options: Any) -> penstock.Job:
    given: dict[str, Any] = {
        "hardware": penstock.Hardware.preset("rtx4090x1"),
        "strategy": PIPELINE.replace("partition-balanced", f"partition-balanced{{stages={stages}}}"),
        "micro_batches": MICRO_BATCHES,
        "cuda_graphs": True,
    }
    example = {"x": torch.zeros(ROWS, 16)}
    return penstock.compile(model or Half(), example_inputs=example, **{**given, **options})


def test_each_micro_batch_in_flight_counts_for_the_whole_step() -> None:
    job, plain = job_of(), job_of(cuda_graphs=False)
    program, counted = job.programs[0], 0
    for name, graphs in graphs_of_stages(program).items():
        spec = program.interface.stages[name]
        assert (graphs.slots, graphs.again) == (MICRO_BATCHES, False)
        around = sum(aligned(t.bytes) for t in (*spec.inputs, *spec.outputs, *spec.outputs))
        around += sum(aligned(t.bytes) for t in spec.inputs if t.requires_grad)
        workspace_bytes = max(spec.forward_workspace_bytes, spec.backward_workspace_bytes)
        each = around + spec.kept_bytes + workspace_bytes + SEGMENTS_BYTES + PRODUCTS_BYTES
        counted += MICRO_BATCHES * each + sum(aligned(param.grad_bytes) for param in spec.params)
    assert len(graphs_of_stages(program)) == 2 and graph_bytes(program) == counted
    assert persistent_bytes(program).device["graphs"] == counted
    kept = [node.meta["type"] for node in program.graph.nodes if node.name.startswith("kept")]
    assert {value.bytes for value in kept} == {0}
    peaks = [profile_memory(each.programs[0]).peak_bytes[ops.DEVICE] for each in (job, plain)]
    assert peaks[0] > peaks[1] and graph_bytes(plain.programs[0]) == 0
    assert peaks[0] >= counted


def test_a_stage_that_draws_runs_as_written_and_is_counted_so() -> None:
    job = job_of(Half(dropout=0.1))
    program = job.programs[0]
    assert list(graphs_of_stages(program)) == ["stage0"]
    assert reasons_without_graphs(program) == {
        "stage1": "it draws random numbers, and the host sets the seed of each draw"
    }
    kept = {n.meta["type"].stage: n.meta["type"].bytes for n in program.graph.nodes if n.name.startswith("kept")}
    assert kept["stage0"] == 0 < kept["stage1"]
    text = graphs_text(job.programs, {})
    assert "stage0  graphed, 4 slots" in text and "stage1  as written: it draws random numbers" in text


@pytest.mark.slow
def test_stages_are_rematerialised_where_their_graphs_do_not_fit_else() -> None:
    """A rematerialised stage has one slot, whatever is in flight. Where that does not fit either, weights would have to
    be fetched."""
    small = penstock.Hardware.preset("rtx4090x1").with_(memory="300MB")
    assert not job_of(hardware=small, cuda_graphs=False).plan.decisions.rematerialise
    job = job_of(hardware=small)
    assert job.plan.decisions.rematerialise == ["stage0", "stage1"]
    assert {(graphs.slots, graphs.again) for graphs in graphs_of_stages(job.programs[0]).values()} == {(0, True)}
    with pytest.raises(PlanError, match="its weights do not stay on the device"):
        job_of(hardware=small.with_(memory="100MB"))


@pytest.mark.parametrize(
    ("old", "new", "leave"),
    [
        ("", "", set()),
        ("c1 = ", "d1 = rt.offload(g1_m1)\n    c1 = ", {"stage1"}),
        ('rt.step("stage1", c1)', 'd1 = rt.offload(c1)\n    rt.step("stage1", d1)', {"stage1"}),  # clipped in place
        ('"loss": [', '"g": [c0], "loss": [', {"stage0"}),
    ],
)
def test_a_stage_whose_gradients_are_read_beside_computation_runs_as_written(
    old: str, new: str, leave: set[str]
) -> None:
    """Also by a copy of what took their memory over: the next step adds up gradients at the same place."""
    (program,) = pipeline(1, 2, 2, fetched=False, kept=True, clip=True)
    text = print_program(program).replace(old, new)
    found = reasons_without_graphs(parse_program(text, program.interface, 0))
    assert found == dict.fromkeys(leave, "its gradients are read beside computation")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cuda_graphs": 1}, "cuda_graphs=1; it is True or False"),
        ({"hardware": penstock.Hardware.preset("laptop-16gb").with_(kind="cpu")}, "needs CUDA devices"),
        ({"compile_stages": True}, "cuda_graphs=True with compile_stages=True"),
        ({"model": Half(dropout=0.1), "stages": 1}, "no stage of this plan can run from CUDA graphs: stage0: it draws"),
        ({"strategy": "async"}, "versions of its weights"),
    ],
)
def test_who_is_refused_is_told_why(options: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        job_of(**options)
