"""A GPU's streams: fetches run under computation, a step waits for nothing but its end, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.bench.peers import parity
from penstock.bench.peers.gpt import SMALL, GptSize
from penstock.bench.peers.gpu_sections import machine, share_under
from penstock.ir import ops
from penstock.runtime.device.streams import CudaStream
from penstock.tests.gpu.rehearsal import (
    DEVICE,
    SETUP,
    batches,
    compile_job,
    exact,
    model_of,
    on_gpu,
    only_on_gpu,
    session_of,
    swapping_job,
)

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
WIDE = GptSize(layers=6, width=2048, heads=16, vocabulary=2048, length=512)  # long enough for a clock


@pytest.mark.real_gpu
def test_fetches_run_under_computation() -> None:
    size = SMALL if SETUP.device == "cpu" else WIDE
    data = batches(size, rows=8, count=1)
    with swapping_job(model_of(size), data[0], stages=4, roomy=True) as job:
        for _ in range(3):
            job.step(data[0])
        timeline = job.timeline()
        fetches = [span for span in timeline.spans if span.op == "fetch"]
        assert len(fetches) >= 2 and all(span.end_s >= span.start_s for span in timeline.spans)
        least = 0.3 if SETUP.on_gpu else 0.0  # a CPU's fetches of so small a model take no time
        assert share_under(timeline, ops.H2D, ops.COMPUTE) >= least
        assert max(span.end_s for span in timeline.spans) <= timeline.step_s * 1.05


def test_spans_of_threads_and_of_the_gpu_share_one_clock() -> None:
    """Every op starts after what it waits for, by the clocks that measured them."""
    data = batches(count=1)
    with swapping_job(model_of(), data[0]) as job:
        for _ in range(2):
            job.step(data[0])
        session = session_of(job)
        issues = session.plans["step"].ops
        spans = {span.text: span for span in session.spans}
        slack_s = 5e-3
        for issue in issues:
            for other in (issues[i] for i in issue.waits):
                if issue.text in spans and other.text in spans:
                    assert spans[other.text].end_s <= spans[issue.text].start_s + slack_s, (issue.text, other.text)


@pytest.mark.parametrize("make", [compile_job, swapping_job], ids=["resident", "swapped"])
def test_a_step_never_waits_for_the_whole_device(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(count=1)
    with make(model_of(), data[0], max_grad_norm=1.0) as job:
        job.step(data[0])

        def refuse(*_: object) -> None:
            raise AssertionError("torch.cuda.synchronize was called")

        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        assert float(job.step(data[0])) > 0
        monkeypatch.undo()


@only_on_gpu
def test_issuing_a_step_never_waits_for_the_gpu() -> None:
    """torch raises for every call that waits for the GPU while the step's ops are issued."""
    data = batches(count=1)
    with compile_job(model_of(), data[0], stages=2, max_grad_norm=1.0) as job:
        job.step(data[0])
        bound: Any = session_of(job).bound["step"]
        own = bound.issue

        def strict(run: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                own(run)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        bound.issue = strict
        assert float(job.step(data[0])) > 0


@only_on_gpu
def test_on_a_gpu_streams_are_cuda_streams_but_for_what_works_on_gradients_in_dram() -> None:
    data = batches(count=1)
    with swapping_job(model_of(), data[0]) as job:
        job.step(data[0])
        kinds = {name: isinstance(stream, CudaStream) for name, stream in session_of(job).streams.made.items()}
        assert kinds.pop(ops.CPU) is kinds.pop(f"{ops.COMM} host") is False  # that one adds a tied weight's gradients
        assert set(kinds) >= {ops.HOST, ops.COMPUTE, ops.H2D, ops.D2H}
        assert all(kinds.values())
        found = {stream.stream.cuda_stream for stream in session_of(job).streams.made.values() if stream.is_cuda}
        assert len(found) == len(kinds) and torch.cuda.default_stream().cuda_stream not in found


def test_the_callers_stream_device_and_generators_are_as_before() -> None:
    data = batches(count=1)
    with compile_job(model_of(), data[0]) as job:
        state = torch.get_rng_state()
        there = torch.cuda.get_rng_state() if SETUP.on_gpu else state
        stream = torch.cuda.current_stream() if SETUP.on_gpu else None
        job.step(data[0])
        assert torch.equal(torch.get_rng_state(), state)
        if SETUP.on_gpu:
            assert torch.equal(torch.cuda.get_rng_state(), there) and torch.cuda.current_stream() == stream


def test_a_batch_may_lie_on_the_device() -> None:
    model, data = model_of(), batches()
    with compile_job(model, data[0]) as job:
        wanted = parity.train_job(job, data)
    with compile_job(model, data[0]) as job:
        found = parity.train_job(job, [{name: value.to(DEVICE) for name, value in batch.items()} for batch in data])
    assert found.losses == wanted.losses


@pytest.mark.real_gpu
def test_detected_figures_are_sane(tmp_path: Path) -> None:
    rows = list(machine(replace(SETUP, scratch=tmp_path)))
    assert [json.dumps(row) for row in rows if row["ok"] is False] == []


@only_on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.multi
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_exchange_by_nccl(precision: str) -> None:
    """Sends, receives, the sum of a tied weight's gradients and the norm over both."""
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision, max_grad_norm=1.0)
    hardware = penstock.Hardware.detect().with_(num_devices=2)
    options: Any = {"optimizer": parity.SGD, "micro_batches": 2, "precision": precision, "max_grad_norm": 1.0}
    with penstock.compile(model, hardware, example_inputs=data[0], strategy="gpipe", **options) as job:
        found = parity.train_job(job, data)
    assert parity.compare(found, wanted, parity.start_of(model)).fits(precision)
