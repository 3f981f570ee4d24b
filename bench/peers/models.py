"""The benchmarks' models and batches: small, with random weights, and without dropout so that losses are comparable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCABULARY = 8192


def gpt2(layers: int = 8, width: int = 256, tied: bool = True, vocabulary: int = VOCABULARY) -> nn.Module:
    """A GPT-2, by default the one of the figures: 8 layers of 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=vocabulary, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """A BERT that predicts words."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536, vocab_size=VOCABULARY,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def llama() -> nn.Module:
    """A Llama with grouped keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=320, num_attention_heads=5, num_key_value_heads=1, intermediate_size=864,
        vocab_size=VOCABULARY, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    """A T5 whose decoder reads the encoder's output in every layer."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=4, vocab_size=VOCABULARY,
        dropout_rate=0.0, tie_word_embeddings=False, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def untied_gpt2() -> nn.Module:
    """The GPT-2 of the figures without tied weights, as torch's tracer unties them."""
    return gpt2(tied=False)


def build_model(name: str) -> nn.Module:
    return {made.__name__: made for made in (gpt2, bert, llama, t5, untied_gpt2)}[name]()


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert, "llama": llama}


def batch(size: int = 8, length: int = 128, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """One global batch of random words, each its own label."""
    words = torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}
