"""Bases in the bits of their files on a GPU: bytes are fetched and unpacked there, and steps equal eager's on a CPU
over the unpacked weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.tests.compiler.job.quantised.models import SGD, STEPS, batch, eager_losses
from penstock.tests.compiler.job.quantised.packed_models import (
    adapt,
    adapters,
    on_meta,
    plain_model,
    write_gpt_oss,
    write_llama,
)
from penstock.tests.gpu.rehearsal import exact, on_gpu

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WRITE: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "mxfp4": write_gpt_oss,
    "fp8": lambda directory: write_llama(directory, "fp8"),
    "int4": lambda directory: write_llama(directory, "int4"),
    "gptq": lambda directory: write_llama(directory, "gptq"),
    "awq": lambda directory: write_llama(directory, "awq"),
    "nvfp4": lambda directory: write_llama(directory, "nvfp4"),
}


@pytest.mark.parametrize("kind", WRITE)
def test_steps_are_those_of_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    theirs = adapt(plain_model(tmp_path, WRITE[kind](tmp_path)), ATTENTION)
    theirs.load_state_dict(adapters(theirs), strict=False)
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path), ATTENTION)
    machine = penstock.Hardware.detect()
    is_narrow = kind == "mxfp4"  # products in groups take bf16 alone there
    options = {"optimizer": SGD, "micro_batches": 2, "strategy": "mobius", "weights": tmp_path}
    options["precision"] = "bf16-true" if is_narrow else "fp32"
    with penstock.compile(model, machine, example_inputs=batch(0), **options) as job:  # type: ignore[arg-type]
        job.load_state_dict(adapters(model), strict=False)
        losses = [float(job.step(batch(step))) for step in range(STEPS)]
        trained = {name: t for name, t in job.state_dict().items() if "lora_" in name}
        assert job.last is not None and job.plan.predicted is not None
        for device, peak in job.last.peak_bytes.items():
            assert peak <= job.plan.predicted.peak_bytes[device]
    assert losses == pytest.approx(expected, rel=1e-2 if is_narrow else 1e-4)
    for name, tensor in trained.items():
        wanted = theirs.get_parameter(name)
        torch.testing.assert_close(tensor.cpu(), wanted, rtol=1e-3, atol=2e-3 if is_narrow else 1e-5)
