"""Families of transformers beyond the zoo, tiny: what their layers have that those of the zoo have not.

Vectors are drawn, not ones and zeros: a bias that is added by each member of a team would not show while it is zero.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from penstock.tests.zoo import VOCABULARY, Made, token_batch, without_cache

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64}
# By the name of the configuration's class: what it is given, and what is special about it.
FAMILIES: dict[str, dict[str, Any]] = {
    "GPTNeoX": {**_HEADS, "intermediate_size": 64},  # attention beside the MLP; queries, keys, values in one product
    "GPTJ": {**_GPT, "rotary_dim": 4},  # attention and MLP read the same norm; part of a head is rotated
    "Phi3": _LLAMA,  # queries, keys, values in one product, and gate and up in another
    "Phi": _LLAMA,  # attention beside the MLP, with biases
    "Gemma": {**_LLAMA, "head_dim": 8},  # weights of norms from zero, hidden states scaled
    "Cohere": _LLAMA,  # attention beside the MLP, logits scaled
    "Falcon": {**_HEADS, "multi_query": True, "bias": True},  # one head of keys
    "Starcoder2": _LLAMA,  # biases in all products
    "StableLm": {**_LLAMA, "use_parallel_residual": True, "use_qkv_bias": True},
    "Olmo2": _LLAMA,  # norms over all heads, and after attention and MLP
    "Granite": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.7},
    "Glm": {**_LLAMA, "head_dim": 8},  # gate and up in one product
    "Nemotron": _LLAMA,  # an MLP of squares
    "Olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},  # norms over all heads, experts
    "GraniteMoe": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {  # experts with biases, sinks in attention, windows
        **_LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def family(name: str, dropout: float = 0.0, seed: int = 0) -> Made:
    """The causal language model of a family, without dropout, and a batch of two rows."""
    assert not dropout, "families differ in what they call dropout"
    torch.manual_seed(seed)
    library = importlib.import_module("transformers")
    config = getattr(library, f"{name}Config")(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=2, **FAMILIES[name]
    )
    for key in ("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout",
                "embedding_dropout"):  # fmt: skip
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = getattr(library, f"{name}ForCausalLM")(config).train()
    for param in model.parameters():
        if param.dim() == 1:
            nn.init.normal_(param, float(param.mean()), 0.3)
    return without_cache(model), token_batch(seed=seed)
