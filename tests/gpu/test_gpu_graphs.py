"""Stages run from CUDA graphs: every number is that of the same plan as written, bit for bit, in the memory counted."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import parity
from penstock.ir.errors import PlanError
from penstock.runtime.accelerator import capturing, new_pool, pools_bytes
from penstock.tests.gpu.rehearsal import (
    DROPPING,
    REHEARSED,
    SETUP,
    batches,
    compile_job,
    exact,
    model_of,
    session_of,
    swapping_job,
)
from penstock.tests.gpu.test_gpu_parity import change
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = pytest.mark.gpu

STEPS = 4
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def train(job: penstock.Job, data: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    losses = [job.step(batch) for batch in data]
    return losses, job.state_dict()


def assert_same(found: tuple[list[Tensor], dict[str, Tensor]], wanted: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert [loss.item() for loss in found[0]] == [loss.item() for loss in wanted[0]]
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


def both(**options: Any) -> None:
    """Train with and without graphs, by one plan."""
    data = batches(count=STEPS)
    with compile_job(model_of(), data[0], cuda_graphs=True, **options) as job:
        found, plan = train(job, data), job.plan
        assert job.last is not None and job.last.ungraphed == {}
        graphs = [store.runner.graphs for store in session_of(job).state.stores.values()]
        assert graphs and all(graphs)
        counted = session_of(job).plans["step"].persistent.device["graphs"]
        assert 0 < sum(each.num_bytes for each in graphs) <= counted
    options.pop("stages", None)
    options.pop("micro_batches", None)
    with compile_job(model_of(), data[0], stages=0, plan=plan, **options) as job:
        assert_same(found, train(job, data))


@pytest.mark.parametrize(
    ("stages", "precision"), core_of([(2, "bf16-true")], product((2, 1), ("fp32", "bf16", "bf16-true", "fp16")))
)
def test_numbers_are_those_as_written(stages: int, precision: str) -> None:
    both(stages=stages, precision=precision, optimizer=ADAMW)


@pytest.mark.parametrize("rows", [4, 8])
def test_each_micro_batch_in_flight_has_a_slot(rows: int) -> None:
    data = batches(rows=rows, count=STEPS)
    with compile_job(model_of(), data[0], cuda_graphs=True, micro_batches=rows, stages=2, max_grad_norm=0.5) as job:
        found, plan = train(job, data), job.plan
        slots = [store.runner.graphs._graphs.slots for store in session_of(job).state.stores.values()]
    assert slots == [rows, rows]
    with compile_job(model_of(), data[0], stages=0, plan=plan, micro_batches=rows, max_grad_norm=0.5) as job:
        assert_same(found, train(job, data))


def test_a_stage_that_is_rematerialised_needs_one_slot() -> None:
    data = batches(count=STEPS)
    plan = change(compile_job(model_of(), data[0], stages=2).plan, rematerialise=["stage0"])
    with compile_job(model_of(), data[0], stages=0, plan=plan, cuda_graphs=True) as job:
        found = train(job, data)
        graphs = session_of(job).state.stores["stage0"].runner.graphs._graphs
        assert (graphs.slots, graphs.again) == (0, True)
    with compile_job(model_of(), data[0], stages=0, plan=plan) as job:
        assert_same(found, train(job, data))


def test_evaluation_and_weights_that_are_loaded_later(tmp_path: Any) -> None:
    """Evaluating between steps changes nothing, and graphs read weights where a checkpoint puts them."""
    data = batches(count=STEPS)
    losses: list[list[float]] = []
    for graphs in (True, False):
        with compile_job(model_of(), data[0], cuda_graphs=graphs, optimizer=ADAMW) as job:
            found = [job.step(data[0]).item(), float(job.evaluate(data[1]).loss)]
            job.save(tmp_path / str(graphs))
            found += [job.step(data[1]).item(), job.step(data[2]).item()]
            job.resume(tmp_path / str(graphs))
            found += [job.step(data[1]).item(), job.step(data[2]).item()]
        assert found[2:4] == found[4:6]
        losses.append(found)
    assert losses[0] == losses[1]


class Solves(nn.Module):
    """Its forward waits for the device, which says whether the matrix could be inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.linalg.solve(y.mT @ y + torch.eye(8, device=y.device), y.mT).mT).square().mean()


def test_a_plan_without_a_stage_for_graphs_is_refused_with_the_reasons() -> None:
    data = batches()
    with pytest.raises(
        PlanError, match="no stage of this plan can run from CUDA graphs: stage0: it draws random numbers"
    ):
        compile_job(model_of(DROPPING), data[0], stages=1, cuda_graphs=True)
    plan = swapping_job(model_of(), data[0]).plan
    with pytest.raises(PlanError, match="its weights do not stay on the device"):
        compile_job(model_of(), data[0], stages=0, plan=plan, cuda_graphs=True)
    rows = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}
    with (
        compile_job(Solves(), rows, stages=1, cuda_graphs=True) as job,
        pytest.raises(PlanError, match="stage0: it waits for the device: called a synchronizing CUDA operation"),
    ):
        job.step(rows)


def test_a_capture_that_fails_leaves_nothing_in_its_pool() -> None:
    """Not the workspace of a product either, which would keep all of the pool's memory."""
    device, pool, graph = torch.device("cuda", 0), new_pool(), torch.cuda.CUDAGraph()
    x = torch.ones(256, 256, device=device)
    with (
        pytest.raises(ZeroDivisionError),
        torch.cuda.stream(torch.cuda.Stream()),
        capturing(graph, pool),
    ):  # fmt: skip
        torch.cat([x @ x for _ in range(100)])
        1 / 0  # noqa: B018
    del graph
    SETUP.tidy()
    assert pools_bytes(device, {pool}) == 0


def half_dropping() -> nn.Module:
    """The first two of four layers drop."""
    model = model_of(DROPPING)
    for block in list(model.blocks)[2:]:  # type: ignore[union-attr,arg-type]
        block.dropout = 0.0
    return model


def test_a_stage_without_graphs_is_named_and_runs_as_written() -> None:
    data = batches(count=STEPS)
    with compile_job(half_dropping(), data[0], stages=2, cuda_graphs=True) as job:
        with pytest.warns(UserWarning, match="cuda_graphs: stage0 runs as written: it draws random numbers"):
            found, plan = train(job, data), job.plan
        assert job.last is not None and list(job.last.ungraphed) == ["stage0"]
        text = job.explain(full=True)
    assert "stage1  graphed, 2 slots" in text and "stage0  as written: it draws random numbers" in text
    with compile_job(half_dropping(), data[0], stages=0, plan=plan) as job:
        assert_same(found, train(job, data))


@pytest.mark.skipif(not REHEARSED and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["1f1b", "interleaved", "data-parallel"])
def test_two_gpus(strategy: str) -> None:
    """Values cross streams and GPUs; of 1F1B the slots serve more micro-batches than are in flight."""
    data = batches(rows=8, count=STEPS)
    hardware = penstock.Hardware.detect().with_(num_devices=2, dram="8GB", memory="2GB")
    options: dict[str, Any] = {"micro_batches": 8 if strategy != "data-parallel" else 4, "optimizer": ADAMW}
    found = []
    for graphs in (True, False):
        made = penstock.compile(
            model_of(), hardware, example_inputs=data[0], strategy=strategy, cuda_graphs=graphs, **options
        )
        with made as job:
            found.append(train(job, data))
            assert job.last is not None and job.last.ungraphed == {}
    assert_same(*found)


@pytest.mark.parametrize(
    ("strategy", "why"), [("zero-bubble", "splits backward"), ("async", "versions of its weights")]
)
def test_schedules_without_graphs_are_refused(strategy: str, why: str) -> None:
    hardware = penstock.Hardware.detect().with_(num_devices=2, dram="8GB", memory="2GB")
    with pytest.raises(PlanError, match=why):
        penstock.compile(
            model_of(),
            hardware,
            example_inputs=batches()[0],
            strategy=strategy,
            micro_batches=4,
            optimizer=parity.SGD,
            cuda_graphs=True,
        )


def test_a_step_takes_no_more_memory_than_is_counted() -> None:
    data = batches()
    with compile_job(model_of(), data[0], stages=2, cuda_graphs=True) as job:
        before_bytes = torch.cuda.memory_allocated()
        job.step(data[0])
        torch.cuda.reset_peak_memory_stats()
        job.step(data[1])
        job.sync()
        assert job.last is not None
        counted_bytes = job.last.peak_bytes[job.hardware.devices[0].name]
        assert torch.cuda.max_memory_allocated() - before_bytes <= counted_bytes
        assert torch.cuda.memory_reserved() - before_bytes <= job.hardware.devices[0].memory_bytes
