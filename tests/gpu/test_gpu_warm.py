"""Stages that are warmed up on a GPU: nothing of it stays, and all is loaded before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock
from penstock.ir import ops
from penstock.runtime.accelerator import on_stream
from penstock.runtime.stage.warm import warm_up
from penstock.tests.gpu.rehearsal import (
    DEVICE,
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
pytestmark = [*on_gpu, only_on_gpu]


@pytest.mark.parametrize("make", [compile_job, swapping_job], ids=["resident", "swapped"])
def test_warming_up_leaves_no_memory(make: Callable[..., penstock.Job]) -> None:
    batch = batches(count=1)[0]
    with make(model_of(), batch, max_grad_norm=1.0) as job:
        session: Any = session_of(job)
        state, programs = session.state, list(session.file.programs.values())
        compute = session.streams.streams_of(session.plans["step"])[ops.COMPUTE]
        torch._C._cuda_clearCublasWorkspaces()  # of tests before
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        with on_stream(compute.stream):
            warm_up(
                state.stores, session.file.build, state.memory.device_arena, programs, "fp32", session.setup.optimizer
            )
        assert torch.cuda.max_memory_allocated(DEVICE) > before[0]
        assert (torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)) == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.multi
def test_a_gpu_that_a_plan_leaves_idle_does_not_end_the_step() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    wanted = float(model(x).square().mean())
    batch, machine = {"input": x}, penstock.Hardware.detect()
    with penstock.compile(
        model, machine, example_inputs=batch, loss_fn=lambda y, _: y.square().mean(), micro_batches=1
    ) as job:
        first, second = (float(job.step(batch)) for _ in range(2))
        assert first == pytest.approx(wanted, rel=1e-4) and second < first
