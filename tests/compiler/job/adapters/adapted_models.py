"""Tiny models of transformers with adapters of PEFT, and jobs that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.tests.compiler.eager_baseline import SGD

MICRO_BATCHES = 4
IDS = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "labels": IDS.clone()}
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes}))


def moe(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
        model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # any other one asks which expert a token goes to, which is data
    return model


def lora(model: Any, **options: Any) -> Any:
    """Adapters that change the model from the beginning: PEFT's own begin with B = 0, which hides mistakes in A."""
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def compile_job(
    model: nn.Module, *, memory: str = "64MB", num_devices: int = 1, batch: Any = BATCH, **options: Any
) -> Job:  # fmt: skip
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    given = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options}
    return penstock.compile(model, hardware, example_inputs=batch, **given)


def two_adapters(active: str | list[str]) -> Callable[[], Any]:
    def make() -> Any:
        model = lora(llama())
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(active)
        return model

    return make


def trained_norms() -> Any:
    model = lora(llama())
    for name, param in model.named_parameters():
        if "norm" in name:
            param.requires_grad_(True)
    return model


def checkpointing(reentrant: bool) -> Callable[[], Any]:
    def make() -> Any:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return lora(model)

    return make


def input_gradients(**options: Any) -> Any:
    model = llama()
    model.enable_input_require_grads()
    return lora(model, **options)


MODELS: dict[str, Callable[[], Any]] = {
    "lora": lambda: lora(llama()),
    "rslora": lambda: lora(llama(), use_rslora=True, lora_alpha=3),
    "dora": lambda: lora(llama(), use_dora=True),
    "biases": lambda: lora(llama(attention_bias=True), bias="all"),
    "head": lambda: lora(llama(), modules_to_save=["lm_head"]),
    "norms": trained_norms,
    "saved norm": lambda: lora(llama(), modules_to_save=["norm"]),
    "saved embedding": lambda: lora(llama(), modules_to_save=["embed_tokens"]),
    "tokens": lambda: lora(llama(), trainable_token_indices=[1, 3, 5]),
    "tied tokens": lambda: lora(llama(tie_word_embeddings=True), trainable_token_indices=[1, 3, 5]),
    "embedding": lambda: lora(llama(), target_modules=["embed_tokens", "q_proj"]),
    "last layer": lambda: lora(llama(), layers_to_transform=[1]),
    "one of two": two_adapters("other"),
    "both of two": two_adapters(["default", "other"]),
    "experts of qwen3": lambda: lora(moe("qwen3_moe"), target_parameters=EXPERTS),
    "experts of mixtral": lambda: lora(moe("mixtral"), target_parameters=EXPERTS),
    "input gradients": lambda: input_gradients(layers_to_transform=[1]),
    "checkpointing": checkpointing(False),
    "reentrant checkpointing": checkpointing(True),
}
