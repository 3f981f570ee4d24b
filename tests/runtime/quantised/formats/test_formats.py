"""Weights that libraries have packed: their own unpacking, bit for bit, whole and a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.quantised.formats.record import Format
from penstock.runtime.quantised.formats.table import FORMATS, METHODS, format_of
from penstock.tests.compiler.job.quantised.packed_models import compressed_config

MADE = Path(__file__).with_name("library_files.safetensors")


def names() -> list[str]:
    with safe_open(MADE, "pt") as file:
        return sorted(file.metadata())


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """A quantization_config, the tensors of a weight, and the weight as its library unpacks it."""
    with safe_open(MADE, "pt") as file:
        keys = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        tensors = {key.removeprefix(f"{name}."): file.get_tensor(key) for key in keys}
        return json.loads(file.metadata()[name]), tensors, tensors.pop("unpacked")


def weights_of(record: Format, options: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> Iterator:
    """The whole weight, and what pieces of it make."""
    options |= {"scale": tensors[record.scale].dtype} if record.scale else {}
    types = record.types(shape, options)
    for key, (wanted, dtype) in types.items():
        assert (tuple(tensors[key].shape) or (1,), tensors[key].dtype) == (wanted, dtype), key
    assert tensors.keys() - types.keys() <= set(record.extras)
    parts = {key: tensors[key] for key in types}
    yield record.unpack(parts, slice(0, shape[0]), shape, options)
    step = record.row_step(options)
    rows = [slice(begin, min(begin + step, shape[0])) for begin in range(0, shape[0], step)]
    yield torch.cat([record.unpack(parts, each, shape, options) for each in rows])


@pytest.mark.parametrize("name", names())
def test_unpacked_as_by_its_library(name: str) -> None:
    config, tensors, expected = case(name)
    found = format_of(config, "layers.0.mlp.up_proj")
    assert found is not None
    for weight in weights_of(*found, tensors, tuple(expected.shape)):
        assert weight.dtype == expected.dtype and torch.equal(weight, expected)


def packed_mxfp4(*outer: int, groups: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    integers = partial(torch.randint, generator=made, dtype=torch.uint8)
    blocks = integers(0, 256, (*outer, groups, 16))
    return {"weight_blocks": blocks, "weight_scales": integers(100, 140, (*outer, groups))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mxfp4_of_gpt_oss(dtype: torch.dtype) -> None:
    """Every value and every exponent of a byte. The library gives the experts' matrices the other way round."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = packed_mxfp4(2, 16, groups=16)
    tensors["weight_scales"] = torch.arange(512).view(2, 16, 16).to(torch.uint8)
    tensors["weight_blocks"][0, 0] = torch.arange(256).view(16, 16).to(torch.uint8)
    expected = convert_moe_packed_tensors(tensors["weight_blocks"], tensors["weight_scales"], dtype=dtype)
    for expert in range(2):
        parts = {name: tensor[expert] for name, tensor in tensors.items()}
        for weight in weights_of(FORMATS["mxfp4"], {}, parts, (16, 512)):
            assert torch.equal(weight.to(dtype).nan_to_num(7), expected[expert].t().nan_to_num(7))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_of_deepseek(dtype: torch.dtype, scale: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 130, (3, 4)).to(torch.uint8) if scale == torch.uint8 else torch.rand(3, 4).to(scale)
    config = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
    found = format_of(config, "q_proj")
    assert found is not None
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    for own in weights_of(*found, {"weight": weight, "weight_scale_inv": scales}, (96, 64)):
        assert torch.equal(own.to(dtype), expected)


def test_fp8_blocks_at_the_edge_of_a_matrix() -> None:
    """As of DeepSeek-V3's kv_a_proj_with_mqa, whose 576 rows are four and a half blocks."""
    weight, scales = torch.randn(36, 20).to(torch.float8_e4m3fn), torch.rand(5, 3)
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    found = format_of(config, "kv_a_proj_with_mqa")
    assert found is not None
    expected = torch.stack([
        torch.stack([weight[i, j].float() * scales[i // 8, j // 8] for j in range(20)]) for i in range(36)
    ])  # fmt: skip
    for own in weights_of(*found, {"weight": weight, "weight_scale_inv": scales}, (36, 20)):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, r"quant_method 'hqq' is not read here; known are awq, .*fp8, gptq, mxfp4"),
        ({"quant_method": "gptq", "bits": 3}, r"bits is 3; read here are 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; read here are 'gemm'"),
        (
            compressed_config("int-quantized", num_bits=8, type="int", strategy="group", actorder="group"),
            "actorder is 'group'",
        ),
        (
            {
                **compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
                "transform_config": {"config_groups": {"u": {}}},
            },
            "rotates inputs of layers",
        ),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        format_of(config, "q_proj")


def test_a_last_group_may_have_fewer_columns() -> None:
    numbers, scales = torch.randint(-128, 128, (4, 80)).to(torch.int8), torch.rand(4, 3) + 0.5
    config = compressed_config("int-quantized", num_bits=8, type="int", strategy="group", group_size=32)
    found = format_of(config, "q_proj")
    assert found is not None
    parts = {"weight": numbers, "weight_scale": scales}
    expected = numbers.float() * torch.stack([scales[:, j // 32] for j in range(80)], 1)
    record, options = found
    assert torch.equal(record.unpack(parts, slice(0, 4), (4, 80), {**options, "scale": torch.float32}), expected)


def test_layers_of_compressed_tensors_have_the_group_that_names_them() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": targets, "weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}

    groups = {"a": group(8, "Linear"), "b": group(4, "re:.*mlp.*", "layers.1.q_proj")}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    bits = {name: format_of(config, name) for name in ("layers.0.q_proj", "layers.1.q_proj", "layers.0.mlp.up_proj")}
    assert [found and found[1]["bits"] for found in bits.values()] == [8, 4, 4]
    config["format"] = "marlin-24"
    with pytest.raises(CheckpointError, match="'compressed-tensors/marlin-24' is not read here; known are"):
        format_of(config, "layers.0.q_proj")
    assert set(METHODS.values()) == set(FORMATS.values())
