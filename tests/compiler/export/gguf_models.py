"""Tiny models with byte-level tokenizers, of the architectures that files of GGUF are written for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.compiler.export.gguf_file import SPLITS

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SHAPE, head_dim=32),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32),
}


def write_tokenizer(directory: Path, split: str = "qwen2") -> None:
    """A byte-level tokenizer, split as the one of that name is."""
    pattern, ignores = next(key for key, name in SPLITS.items() if name == split)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*letters, "th", "the"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")], ignore_merges=ignores))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if pattern else steps[0]
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(directory)


def write_model(directory: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return load_file(directory / "model.safetensors")
