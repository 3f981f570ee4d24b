"""Weights that torchao has quantised, with LoRA: a compiled job's steps are those of the library in eager.

Losses of the first step are equal bit for bit. In backward the library multiplies with the weight that it kept, in its
own order; here it is unpacked again, so that later ones may differ by rounding (1e-6 of each loss and adapter).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

import penstock
from penstock.errors import CheckpointError, PlanError
from penstock.tests.compiler.job.quantised.models import (
    SGD,
    STEPS,
    adapt,
    batch,
    eager_losses,
    trained_params,
    write_whole,
)

CONFIGS = {
    "float8": Float8WeightOnlyConfig(),
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole"))


def with_config(directory: Path, config: Any) -> nn.Module:
    how = TorchAoConfig(config)
    return adapt(AutoModelForCausalLM.from_pretrained(directory, quantization_config=how))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("memory", ["64MB", "750kB"])
def test_steps_are_those_of_the_library(whole: Path, kind: str, memory: str) -> None:
    theirs, own = with_config(whole, CONFIGS[kind]), with_config(whole, CONFIGS[kind])
    losses = eager_losses(theirs)
    machine = penstock.Hardware.cpu(1, memory=memory, dram="1GB")
    with penstock.compile(
        own, machine, example_inputs=batch(0), optimizer=SGD, micro_batches=1, strategy="mobius"
    ) as job:
        assert memory == "64MB" or 'fetch("stage2.weights")' in job.folder.files[0]
        found = [float(job.step(batch(step))) for step in range(STEPS)]
        job.sync()
        packed = [p for spec in job.folder.interface.stages.values() for p in spec.params if "weight_qdata" in p.name]
        assert len(packed) == 4 * 7 and {p.dtype for p in packed} == {"uint8"}
    assert found[0] == losses[0] and found == pytest.approx(losses, rel=1e-6)
    expected = trained_params(theirs)
    for name, param in trained_params(own).items():
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_on_meta_reads_what_torchao_has_quantised(whole: Path, tmp_path: Path) -> None:
    how = TorchAoConfig(CONFIGS["float8"])
    live = AutoModelForCausalLM.from_pretrained(whole, quantization_config=how)
    live.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole))
    quantize_(empty.model, CONFIGS["float8"])
    own = adapt(empty)
    options: dict[str, Any] = {"example_inputs": batch(0), "optimizer": SGD, "micro_batches": 1, "strategy": "gpipe"}
    with penstock.compile(own, penstock.Hardware.cpu(1), weights=tmp_path, **options) as job:
        job.step(batch(0))
        found = {name: tensor for _, weights, _ in job.states() for name, tensor in weights.items()}
    weight = live.model.layers[2].mlp.up_proj.weight
    front = "base_model.model.model.layers.2.mlp.up_proj.weight_"
    assert torch.equal(found[f"{front}qdata"], weight.qdata.view(torch.uint8))
    assert torch.equal(found[f"{front}scale"].view(torch.float32), weight.scale)
    with pytest.raises(CheckpointError, match=r"is not quantised in these files, but by torchao in the model"):
        penstock.compile(own, penstock.Hardware.cpu(1), weights=whole, **options)


def test_quantised_activations_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    quantize_(model[0], Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(PlanError, match=r"0\.weight is torchao's Int8Tensor with act_quant_kwargs"):
        penstock.compile(model, penstock.Hardware.cpu(1), example_inputs={"input": torch.zeros(4, 64)})
