"""Compiled stages on a GPU: training equals eager, in no more memory, on the instruction's own stream.

torch's own backend writes kernels that only a GPU runs. Under emulation the others go through all the rest: the trial,
one compilation for a class, streams, weights that move, memory.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from penstock.bench.peers import parity
from penstock.ir import ops
from penstock.ir.errors import PlanError
from penstock.tests.gpu.rehearsal import (
    DEVICE,
    KINDS,
    REHEARSED,
    SETUP,
    batches,
    compile_job,
    exact,
    model_of,
    on_gpu,
    only_on_gpu,
    session_of,
)
from penstock.tests.gpu.test_gpu_parity import change
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

STATE = "penstock.runtime.device.state"
# "eager" runs the block's own calls from Dynamo's graph; "aot_eager" those of its joint graph, forward and backward.
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(f"{STATE}.BACKEND", request.param)
    return str(request.param)


CORE = {("2 stages", "fp32", "eager")}


@pytest.mark.parametrize(
    ("kind", "precision", "backend"), core_of(CORE, product(KINDS, ("fp32", "bf16"), BACKENDS)), indirect=["backend"]
)
def test_losses_and_weights_are_eagers(kind: str, precision: str, backend: str) -> None:
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision)
    with KINDS[kind](model, data[0], precision=precision, compile_stages=True) as job:
        found = parity.train_job(job, data)
        assert job.last.eager_blocks == {}
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_one_compilation_serves_all_blocks_of_all_stages(backend: str) -> None:
    with KINDS["2 stages"](model_of(), batches()[0], compile_stages=True) as job:
        job.step(batches()[0])
        assert job.last.eager_blocks == {}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialised"])
def test_a_step_takes_no_more_memory_than_as_written_or_counted(again: bool, backend: str) -> None:
    """Of the allocator's bytes at the peak of a step. A compiled block's backward holds the gradient that it was given,
    and those of its weights, to its end; as written it lets go of each. A class for which the plan's account of its
    stage has no room for that runs as written."""
    model, data = model_of(), batches()
    plan = compile_job(model, data[0]).plan
    if again:
        plan = change(plan, rematerialise=["stage0"])
    peaks, trained = [], []
    for compile_stages in (False, True):
        with compile_job(copy.deepcopy(model), data[0], stages=0, plan=plan, compile_stages=compile_stages) as job:
            trained.append(parity.train_job(job, data))
            assert job.last.eager_blocks == {}
            if not REHEARSED:
                SETUP.tidy()
                torch.cuda.reset_peak_memory_stats()
                before_bytes = torch.cuda.memory_allocated()
                lasting_bytes = session_of(job).state.memory.accounts[ops.DEVICE].live_bytes
                job.step(data[0])
                job.sync()
                peaks.append(torch.cuda.max_memory_allocated() - before_bytes)
                counted = job.last.peak_bytes[job.hardware.devices[0].name] - lasting_bytes
    assert parity.compare(trained[1], trained[0], parity.start_of(model)).fits("fp32")
    assert REHEARSED or 0 < peaks[1] <= max(peaks[0], counted), (peaks, counted)


@only_on_gpu
def test_compiled_code_runs_on_the_stream_of_its_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    @torch._dynamo.register_backend(name="penstock_noting")
    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            streams.append(torch.cuda.current_stream())
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    monkeypatch.setattr(f"{STATE}.BACKEND", "penstock_noting")
    data = batches()
    with compile_job(model_of(), data[0], compile_stages=True) as job:
        job.step(data[0])
        assert job.last.eager_blocks == {}
        own = session_of(job).streams.made["compute"].stream
        streams.clear()
        job.step(data[1])
        job.sync()
    assert set(streams) == {own} and own != torch.cuda.default_stream()


@only_on_gpu
def test_a_python_without_triton_is_told_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    data = batches()
    with compile_job(model_of(), data[0], compile_stages=True) as job, pytest.raises(PlanError, match="needs Triton"):
        job.step(data[0])
