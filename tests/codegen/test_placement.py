"""Generated stages put everything where the runtime says: on the meta device, a tensor made elsewhere is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.compiler.strategies import PIPELINE
from penstock.runtime.device.file import open_device_file
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.zoo import zoo

META = torch.device("meta")
ONE_STAGE = PIPELINE.replace("partition-balanced", "partition-balanced{stages=1}")


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=META)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("bert", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
        "in_place",
        "lstm",
    ],
)
def test_every_tensor_is_made_on_the_stages_device(name: str, tmp_path: Path) -> None:
    model, batch = zoo()[name]()
    hardware = penstock.Hardware.cpu(1, memory="1GB")
    job = penstock.compile(model, hardware, example_inputs=batch, micro_batches=1, strategy=ONE_STAGE)
    spec = job.folder.interface.stages["stage0"]
    file = open_device_file(job.write(tmp_path) / "device0.py", job.folder.interface, 0)
    with META:
        module = file.stages["stage0"]()
    runner = StageRunner(spec, module, META, "fp32")
    runner.load_buffers({buffer.name: empty(buffer.shape, buffer.dtype) for buffer in spec.buffers})
    runner.bind({param.name: empty(param.shape, param.dtype) for param in spec.params})
    runner._changing = []  # finding out which buffers change needs values
    inputs = [empty(i.shape, i.dtype) for i in spec.inputs]
    outputs, _ = runner.forward(inputs, seed=0, keep=False)
    assert {t.device for t in (*outputs, *runner.evaluate(inputs, seed=0))} == {META}
