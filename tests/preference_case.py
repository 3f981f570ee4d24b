"""Small models with adapters, and batches of pairs, for tests of preference training."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

VOCABULARY = 61
SIDES = ("chosen", "rejected")


def adapt(
    kind: str = "llama", dropout: float = 0.0, num_layers: int = 3, seed: int = 0, vocabulary: int = VOCABULARY,
    **lora: Any,
) -> Any:  # fmt: skip
    """A PeftModel over a small decoder in training mode, whose adapters are no longer zero."""
    torch.manual_seed(seed)
    base: nn.Module
    if kind == "llama":
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout,
            )
        )  # fmt: skip
        targets = ["q_proj", "v_proj", "down_proj"]
    else:
        base = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocabulary, n_embd=32, n_layer=num_layers, n_head=4, n_positions=32, resid_pdrop=dropout,
                embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
        targets = ["c_attn", "c_fc"]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets,
        fan_in_fan_out=kind == "gpt2", **lora,
    )  # fmt: skip
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:  # zero at first, when policy and reference are the same
                param.normal_(std=0.2)
    return model.train()


def pairs(rows: int = 4, length: int = 10, seed: int = 1) -> dict[str, Tensor]:
    """Pairs of a prompt of three tokens and two answers of different lengths, padded."""
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, VOCABULARY, (rows, 3), generator=draw)
    batch = {}
    for shift, side in enumerate(SIDES):
        tokens = torch.cat([prompt, torch.randint(1, VOCABULARY, (rows, length - 3), generator=draw)], dim=1)
        ends = length - torch.arange(rows).add(shift)[:, None] % 4
        mask = (torch.arange(length) < ends).long()
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, :3] = -100
        batch |= {f"{side}_input_ids": tokens * mask, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return batch
