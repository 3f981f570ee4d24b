"""Bases that files have packed, by name: what is planned without a library is what its files would be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.cli.options import PlanOptions
from penstock.compiler.models.bases import PACKED
from penstock.compiler.models.named import find_model
from penstock.errors import PlanError
from penstock.ir.machine.hardware import Hardware

SMALL = "hidden_size=128,intermediate_size=256,num_hidden_layers=2,num_attention_heads=4,vocab_size=64"
LLAMA = f"llama-8b:{SMALL},num_key_value_heads=2"
GPT_OSS = f"gpt-oss-120b:{SMALL},num_key_value_heads=2,head_dim=32,num_local_experts=4"
ADAPTER = "lora:r=2,targets=q_proj+v_proj"


def packed_bytes(model: nn.Module) -> dict[str, int]:
    """The bytes of packed tensors, by the last part of their names."""
    found: Counter[str] = Counter()
    for name, param in model.named_parameters():
        if param.dtype == torch.uint8:
            assert not param.requires_grad and param.is_meta
            found[name.rpartition(".")[2]] += param.numel()
    return dict(found)


WEIGHTS = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
EXPERTS = 2 * 4 * 3 * 128 * 256


@pytest.mark.parametrize(
    ("name", "base", "expected"),
    [
        (LLAMA, "int4", {"weight_packed": WEIGHTS // 2, "weight_scale": 2 * WEIGHTS // 128}),
        (LLAMA, "fp8", {"weight": WEIGHTS, "weight_scale_inv": 2 * 4 * (2 + 2 + 2 * 3)}),
        (GPT_OSS, "mxfp4", {"weight_blocks": EXPERTS // 2, "weight_scales": EXPERTS // 32}),
        (GPT_OSS, None, {"weight_blocks": EXPERTS // 2, "weight_scales": EXPERTS // 32}),
        (GPT_OSS, "bf16", {}),
    ],
)
def test_a_plan_has_the_bytes_of_files(name: str, base: str | None, expected: dict[str, int]) -> None:
    named = find_model(name, adapter=ADAPTER, base=base)
    own, theirs = named.describe(), named.on_meta()
    assert packed_bytes(own) == packed_bytes(theirs) == expected

    def shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
        return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}

    assert shapes(own) == shapes(theirs)


def test_everything_around_a_packed_base_computes_in_bf16() -> None:
    machine = Hardware.preset("rtx4090x1")
    options = PlanOptions(model="gpt-oss-20b", adapter=ADAPTER, hardware=["rtx4090x1"])
    assert options.precision_on(machine) == "bf16-true"


def test_a_base_without_its_weights_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--base mxfp4: packs matrices of experts, and .* has none; bf16, int8, nf4"):
        find_model(LLAMA, adapter=ADAPTER, base="mxfp4").describe()
    with pytest.raises(PlanError, match=r"--base 'fp4'; allowed are bf16, int8, nf4, fp8, int4, mxfp4"):
        find_model(LLAMA, adapter=ADAPTER, base="fp4")
    with pytest.raises(PlanError, match=r"--base int4: .* has no weights here that are packed in this form"):
        find_model(LLAMA, adapter=ADAPTER, base="int4").load()
    with pytest.raises(PlanError, match="DoRA begins from the norms"):
        find_model(LLAMA, adapter=f"{ADAPTER},dora", base="int4").on_meta()


def test_files_of_another_form_than_the_base_are_not_its_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_model(str(tmp_path), adapter=ADAPTER, base="fp8").weights == tmp_path
    assert find_model(str(tmp_path), adapter=ADAPTER).weights == tmp_path
    assert find_model(str(tmp_path), adapter=ADAPTER, base="int4").weights is None
    with pytest.raises(PlanError, match=r"--base bf16: .* has weights that are packed already \(fp8\): leave"):
        find_model(str(tmp_path), adapter=ADAPTER, base="bf16")
    with pytest.raises(PlanError, match=r"packed \(fp8\), and this needs them whole"):
        find_model(str(tmp_path), adapter=ADAPTER).load()
    with pytest.raises(PlanError, match="dora on a base of fp8"):
        find_model(str(tmp_path), adapter=f"{ADAPTER},dora").on_meta()


@pytest.mark.parametrize(
    "left_out", [{"modules_to_not_convert": [r"model.layers.\d+.mlp"]}, {"ignore": ["re:.*mlp.*"]}]
)
def test_a_plan_without_files_packs_what_the_config_says(tmp_path: Path, left_out: dict[str, list[str]]) -> None:
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    method: dict[str, Any] = PACKED["int4"] if "ignore" in left_out else {"quant_method": "fp8"}
    config = {"model_type": "llama", "vocab_size": 64, **fields, "quantization_config": {**method, **left_out}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = find_model(str(tmp_path), adapter=ADAPTER)
    for model in (named.describe(), named.on_meta()):
        packed = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
        assert packed and not any("mlp" in name for name in packed)
