"""The memory of an optimizer's step on a GPU beside parameters, gradients and states: as counted, by torch's
allocator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from penstock.bench.gpu.machine import is_emulated
from penstock.bench.peers.gpu_sections import allocator_peak
from penstock.graph.operators.table import workspace_bytes
from penstock.ir import ops
from penstock.runtime.measure.temporaries import step_bytes
from penstock.runtime.optimizer.spec import OptimizerSpec
from penstock.runtime.optimizer.stage_optimizer import StageOptimizer
from penstock.tests.gpu.rehearsal import SETUP, WIDE, batches, compile_job, exact, model_of, on_gpu, only_on_gpu

__all__ = ["exact"]  # a fixture
pytestmark = [*on_gpu, only_on_gpu]
SHAPES = {"a": (2048, 1024), "b": (1024, 2048), "c": (1024, 1024), "d": (2048, 1024)}
CASES: dict[str, Any] = {
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, loop": partial(torch.optim.AdamW, foreach=False),
    "AdamW, fused": torch.optim.AdamW,
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad, fused": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_is_counted(name: str) -> None:
    spec = OptimizerSpec.from_callable(CASES[name])
    params = {key: torch.ones(shape, device="cuda") for key, shape in SHAPES.items()}
    grads = {key: torch.ones_like(p) for key, p in params.items()}
    held = None if is_emulated() else workspace_bytes  # kernels that stand in for a GPU's hold nothing
    counted = step_bytes(spec, [(key, shape, torch.float32) for key, shape in SHAPES.items()], "cuda", held=held)
    part = StageOptimizer(spec, params)
    for _ in range(7):
        part.step(grads)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    part.step(grads)
    found = torch.cuda.max_memory_allocated() - before
    assert found <= counted + (1 << 20) and counted <= 1.25 * found + (1 << 20), (found, counted)


@pytest.mark.parametrize("name", ["NAdam", "AdamW, foreach"])
def test_a_job_takes_what_is_accounted(name: str) -> None:
    model, data = model_of(WIDE), batches(WIDE, rows=4, count=1)
    before = torch.cuda.memory_allocated()
    with compile_job(model, data[0], optimizer=CASES[name], stages=1) as job:
        interface = job.folder.interface
        assert all(interface.temporary_bytes(stage, ops.DEVICE) > 0 for stage in interface.stages.values())
        job.step(data[0])
        job.step(data[0])
        taken_bytes, _ = allocator_peak(SETUP, job, data[0], before)
        assert job.last is not None
        accounted = job.last.peak_bytes[job.hardware.devices[0].name]
        assert 0.6 * accounted <= taken_bytes <= 1.05 * accounted
