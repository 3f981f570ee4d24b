"""A tiny Llama with quantised weights and adapters, in all ways of loading it; and its steps in eager."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.integrations import replace_with_bnb_linear

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAPTED = ["q_proj", "v_proj", "down_proj"]
STEPS = 4
LAYERS = 4
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUANTISATIONS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4-double": {**NF4, "bnb_4bit_use_double_quant": True},
    "nf4-bf16": {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    "fp4": {**NF4, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def write_whole(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint that is not quantised."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory)
    return directory


def load_model(directory: Path, kind: str | None) -> nn.Module:
    """The model as its library loads it; `kind` None: as the checkpoint says."""
    how = {} if kind is None else {"quantization_config": BitsAndBytesConfig(**QUANTISATIONS[kind])}
    return AutoModelForCausalLM.from_pretrained(directory, **how)  # type: ignore[no-any-return]


def on_meta(directory: Path, kind: str, packed: bool = False) -> nn.Module:
    """The model without memory, with its linear layers replaced."""
    how = BitsAndBytesConfig(**QUANTISATIONS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    replaced = replace_with_bnb_linear(model, ["lm_head"], how, pre_quantized=packed)
    setattr(replaced, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return replaced  # type: ignore[no-any-return]


def adapt(model: nn.Module) -> nn.Module:
    """With LoRA, both of whose matrices begin with numbers other than zero, in training mode."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=ADAPTED, init_lora_weights=False)
    return get_peft_model(model, config).train()  # type: ignore[arg-type, return-value]


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def eager_losses(model: nn.Module, dtype: torch.dtype | None = None) -> list[float]:
    """The losses of the steps; under autocast to `dtype`, if given."""
    optimizer = SGD(list(trained_params(model).values()))
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
