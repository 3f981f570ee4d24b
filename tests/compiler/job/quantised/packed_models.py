"""Tiny models whose files are packed: random numbers in every format, and the same weights unpacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from penstock.runtime.quantised.formats.record import Format, Layout
from penstock.runtime.quantised.formats.table import format_of
from penstock.runtime.quantised.packed import key_of

ADAPTED = ["q_proj", "v_proj", "down_proj"]


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"0": group}}


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "int4": compressed_config(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "int8": compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
    "float8": compressed_config("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "nvfp4": compressed_config(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
}
_SIZE = {"mxfp4": 0.05 / 3, "nvfp4": 0.05 / 3, "fp8-blocks": 0.05, "scaled": 0.05, "gptq": 0.01, "awq": 0.01}


def random_tensors(record: Format, options: Layout, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors of a weight of random numbers, about as large as a trained one's."""
    found: dict[str, Tensor] = {}
    for name, (own, dtype) in record.types(shape[-2:], options).items():
        own = (*shape[:-2], *own)
        if name == "weight_scales":  # exponents
            found[name] = torch.randint(119, 123, own).to(torch.uint8)
        elif name == "g_idx":
            groups = record.types(shape[-2:], options)["qzeros"][0][0]
            found[name] = (torch.arange(own[0]) * groups // own[0]).to(torch.int32)[torch.randperm(own[0])]
        elif name == "weight_global_scale":
            found[name] = torch.full(own, 16.0)
        elif dtype in (torch.float32, torch.float16, torch.bfloat16):
            size = _SIZE.get(record.name, 0.01) / (
                50 if options.get("kind") == "int" or options.get("bits") == 8 else 1
            )
            found[name] = ((torch.rand(own) / 2 + 0.5) * size).to(dtype)
        elif dtype == torch.float8_e4m3fn:
            found[name] = (torch.randn(own).abs() + 0.1 if "scale" in name else torch.randn(own)).to(dtype)
        else:
            numbers = torch.iinfo(dtype)
            found[name] = torch.randint(numbers.min, numbers.max, own).to(dtype)
    return found


def pack_files(directory: Path, config: dict[str, Any], is_packed: Callable[[str], bool]) -> dict[str, Tensor]:
    """Exchange weights in a directory for packed ones of the same shapes; returns these unpacked in fp32."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    whole: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for key in [key for key in tensors if is_packed(key)]:
        found = format_of(config, key.removesuffix(".weight"))
        assert found is not None
        record, options = found
        model_weight = tensors.pop(key)
        is_stack = model_weight.dim() == 3
        shape = tuple((model_weight.transpose(1, 2) if is_stack else model_weight).shape)
        packed = random_tensors(record, options, shape)
        tensors |= {key_of(key, name): tensor for name, tensor in packed.items()}
        rows = slice(0, shape[-2])
        if is_stack:
            experts = [{name: tensor[i] for name, tensor in packed.items()} for i in range(shape[0])]
            whole[key] = torch.stack([record.unpack(one, rows, shape[1:], options).float().t() for one in experts])
        else:
            whole[key] = record.unpack(packed, rows, shape, options).float()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, {"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return whole


def write_llama(directory: Path, kind: str) -> dict[str, Tensor]:
    """A Llama with packed layers; returns their weights."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return pack_files(directory, CONFIGS[kind], lambda key: "_proj" in key)


def write_qwen2(
    directory: Path, kind: str, is_packed: Callable[[str], bool] = lambda key: key.endswith("_proj.weight")
) -> dict[str, Tensor]:
    """A Qwen2, whose attention has biases, with packed layers and a head of its own; returns their weights."""
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return pack_files(directory, CONFIGS[kind], is_packed)


def write_gpt_oss(directory: Path, layers: int = 2) -> dict[str, Tensor]:
    """The shape of gpt-oss in small, with packed experts; returns their matrices."""
    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return pack_files(
        directory, {"quant_method": "mxfp4"}, lambda key: key.endswith(("gate_up_proj", "experts.down_proj"))
    )


def write_qwen3_moe(directory: Path, kind: str, width: int = 64) -> Path:
    """A mixture with packed experts, one after another in its files; returns a directory of the same unpacked."""
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    packed, plain = directory / "packed", directory / "plain"
    for each in (packed, plain):
        AutoModelForCausalLM.from_config(config).save_pretrained(each)
    whole = pack_files(packed, CONFIGS[kind], lambda key: "_proj" in key)
    assert any(".experts.3.gate_proj.weight" in key for key in whole)
    file = plain / "model.safetensors"
    save_file({**load_file(packed / "model.safetensors"), **whole}, file, {"format": "pt"})
    tensors = {name: tensor for name, tensor in load_file(file).items() if tensor.dtype == torch.float32}
    save_file({name: t for name, t in tensors.items() if not name.endswith("_scale_inv")}, file, {"format": "pt"})
    return plain


def on_meta(directory: Path, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), **changes)  # type: ignore[no-any-return]


def plain_model(directory: Path, whole: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in memory, with plain weights."""
    config = AutoConfig.from_pretrained(directory)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
    tensors = {name: t for name, t in load_file(directory / "model.safetensors").items() if name in model.state_dict()}
    found = model.load_state_dict({**tensors, **whole}, strict=False)
    assert not found.unexpected_keys and not found.missing_keys
    return model


def adapt(model: nn.Module, targets: list[str] | None = None) -> nn.Module:
    """With LoRA, in training mode. Both factors are set by `fill_adapters`."""
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets or ADAPTED)
    where = next(model.parameters()).device
    with torch.device(where):
        return get_peft_model(model, config).train()  # type: ignore[arg-type, return-value]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Random values of the adapters, the same for all models of one shape."""
    made = torch.Generator().manual_seed(1)
    names = sorted(name for name, _ in model.named_parameters() if "lora_" in name)
    return {name: torch.randn(model.get_parameter(name).shape, generator=made) * 0.1 for name in names}
