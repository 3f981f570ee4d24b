"""Dimensions of well-known models by short name, so that planning needs no network.

A row is the model type of `transformers` and what differs from its configuration's defaults. The figures are those of
the published configurations; `gpt3-*` are the sizes of Brown et al. 2020 and Fuyou, `mobius-*`, `mics-*` those of the
papers of these names, as GPT-2 and BERT modules.
"""

from __future__ import annotations

import re
from typing import Any

ModelRow = tuple[str, dict[str, Any]]


def known_models() -> dict[str, ModelRow]:
    """Short name to (model type, fields of its configuration)."""
    return {
        **_gpt2(), **_opt(), **_llama(), **_qwen3(), **_qwen3_moe(), **_gpt_oss(), **_bert(), **_t5(), **_bart(),
        **_vit(), **_hybrids(),
        "phi-1.5": ("phi", {}),  # the configuration's defaults are its figures
        "stablelm-alpha-3b": (
            "gpt_neox",
            {"vocab_size": 50688, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16,
             "num_attention_heads": 32, "max_position_embeddings": 4096},
        ),
        "falcon-40b": (
            "falcon",
            {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
             "new_decoder_architecture": True},
        ),
        "mistral-7b": ("mistral", {"vocab_size": 32000, "sliding_window": 4096}),
        "deepseek-v3": ("deepseek_v3", {}),  # the configuration's defaults are its figures
        "mixtral-8x7b": ("mixtral", {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}),
    }  # fmt: skip


def alias_of(name: str) -> str:
    """The short name of a hub name: "facebook/opt-1.3b" and "OPT-1.3B" are both "opt-1.3b", and so for variants of the
    same dimensions, such as "Llama-3.1-8B-Instruct"."""
    variants = r"(-(instruct|thinking|chat|hf|it|uncased|cased|v0\.1|base-8k))+$"
    short = re.sub(variants, "", name.rpartition("/")[2].lower())
    short = re.sub(r"(?<=\db)-base$", "", short)
    short = re.sub(r"^(meta-)?llama-?3(\.[1-3])?-", "llama-", short)
    return {
        "llama-2-7b": "llama2-7b",
        "llama-2-13b": "llama2-13b",
        "llama-2-70b": "llama2-70b",
        "gpt3": "gpt3-175b",
        "gpt2-1.5b": "gpt2-xl",
        "vit-base-patch16-224": "vit-base",
        "vit-large-patch16-224": "vit-large",
        "jamba": "jamba-52b",
    }.get(short, short)


def _gpt2() -> dict[str, ModelRow]:
    """Layers, hidden size, heads, positions."""
    sizes = {
        "gpt2": (12, 768, 12, 1024), "gpt2-medium": (24, 1024, 16, 1024), "gpt2-large": (36, 1280, 20, 1024),
        "gpt2-xl": (48, 1600, 25, 1024), "gpt3-6.7b": (32, 4096, 32, 2048), "gpt3-13b": (40, 5120, 40, 2048),
        "gpt3-33b": (60, 6656, 52, 2048), "gpt3-65b": (80, 8192, 64, 2048), "gpt3-135b": (88, 11264, 88, 2048),
        "gpt3-175b": (96, 12288, 96, 2048), "gpt3-276b": (112, 14336, 112, 2048),
        "gpt3-412b": (128, 16384, 128, 2048), "gpt3-805b": (160, 20480, 160, 2048),
        "mobius-3b": (64, 2048, 32, 1024), "mobius-8b": (40, 4096, 32, 1024), "mobius-15b": (40, 5120, 64, 1024),
        "mobius-51b": (50, 9216, 72, 1024),  # the paper gives 80 heads, which do not divide 9216
    }  # fmt: skip
    keys = ("n_layer", "n_embd", "n_head", "n_positions")
    one_call = {"activation_function": "gelu_pytorch_tanh"}  # as in Megatron; GPT-2's own spells it out in eight calls
    return {
        name: ("gpt2", {**dict(zip(keys, row)), **(one_call if name.startswith("gpt3") else {})})
        for name, row in sizes.items()
    }


def _opt() -> dict[str, ModelRow]:
    """Hidden size, layers, heads; the feed-forward layer is four times as wide."""
    sizes = {
        "125m": (768, 12, 12), "1.3b": (2048, 24, 32), "2.7b": (2560, 32, 32), "6.7b": (4096, 32, 32),
        "13b": (5120, 40, 40), "30b": (7168, 48, 56), "66b": (9216, 64, 72), "175b": (12288, 96, 96),
    }  # fmt: skip
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    rows = {f"opt-{s}": ("opt", {**dict(zip(keys, row)), "ffn_dim": 4 * row[0]}) for s, row in sizes.items()}
    small = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096}
    return {**rows, "opt-350m": ("opt", {**small, "word_embed_proj_dim": 512, "do_layer_norm_before": False})}


def _llama() -> dict[str, ModelRow]:
    """Hidden and feed-forward size, layers, heads, key-value heads, vocabulary, positions."""
    sizes = {
        "llama2-7b": (4096, 11008, 32, 32, 32, 32000, 4096), "llama2-13b": (5120, 13824, 40, 40, 40, 32000, 4096),
        "llama2-70b": (8192, 28672, 80, 64, 8, 32000, 4096), "llama-8b": (4096, 14336, 32, 32, 8, 128256, 8192),
        "llama-70b": (8192, 28672, 80, 64, 8, 128256, 8192),
        "llama-405b": (16384, 53248, 126, 128, 8, 128256, 8192),
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return {name: ("llama", {**_decoder(*row), **(rope if row[5] == 128256 else {})}) for name, row in sizes.items()}


def _gpt_oss() -> dict[str, ModelRow]:
    """Layers and experts; all else are the configuration's defaults. Experts are published in MXFP4."""
    sizes = {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)}
    form = {"quantization_config": {"quant_method": "mxfp4"}}
    return {
        name: ("gpt_oss", {"num_hidden_layers": layers, "num_local_experts": experts, **form})
        for name, (layers, experts) in sizes.items()
    }


def _qwen3() -> dict[str, ModelRow]:
    """Hidden and feed-forward size, layers, heads; the small ones tie their embeddings."""
    sizes = {
        "0.6b": (1024, 3072, 28, 16), "1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32),
        "8b": (4096, 12288, 36, 32), "14b": (5120, 17408, 40, 40), "32b": (5120, 25600, 64, 64),
    }  # fmt: skip
    common = {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    return {
        f"qwen3-{name}": (
            "qwen3",
            {**_decoder(*row, 8, 151936, 40960), **common, "tie_word_embeddings": row[0] <= 2560},
        )
        for name, row in sizes.items()
    }


def _qwen3_moe() -> dict[str, ModelRow]:
    """Hidden size, feed-forward size of dense layers and of experts, layers, heads; 128 experts, 8 of them a token."""
    sizes = {"30b-a3b": (2048, 6144, 768, 48, 32), "235b-a22b": (4096, 12288, 1536, 94, 64)}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "head_dim": 128, **rope}
    return {
        f"qwen3-{name}": (
            "qwen3_moe",
            {**_decoder(hidden, dense, layers, heads, 4, 151936, 40960), "moe_intermediate_size": expert, **experts},
        )
        for name, (hidden, dense, expert, layers, heads) in sizes.items()
    }


def _hybrids() -> dict[str, ModelRow]:
    """Attention beside states along the sequence. An empty row: the configuration's defaults are its figures."""
    falcon: dict[str, Any] = {"head_dim": 128, "mamba_d_head": 128, "mamba_d_state": 256}
    falcon_keys = (*_KEYS, "mamba_n_heads", "mamba_d_ssm", "mamba_n_groups")
    falcon_sizes = {
        "7b": (3072, 12288, 44, 12, 2, 130048, 262144, 24, 3072, 1),
        "34b": (5120, 21504, 72, 20, 4, 261120, 262144, 32, 4096, 2),
    }
    granite = {
        **_decoder(4096, 768, 40, 32, 8, 100352, 131072), "shared_intermediate_size": 1536, "num_local_experts": 72,
        "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)],
    }  # fmt: skip
    nemotron = {
        "hybrid_override_pattern": "M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-", "num_hidden_layers": 52,
        "n_groups": 8, "ssm_state_size": 128,
    }  # fmt: skip
    lfm2 = {"hidden_size": 2048, "num_hidden_layers": 16}
    lfm2_types = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
    mamba = {"hidden_size": 2560, "num_hidden_layers": 64}
    return {
        **{
            f"falcon-h1-{name}": ("falcon_h1", {**falcon, **dict(zip(falcon_keys, row))})
            for name, row in falcon_sizes.items()
        },
        "qwen3-next-80b-a3b": ("qwen3_next", {}),
        "qwen3.5-9b": ("qwen3_5_text", {}),
        "qwen3.5-35b-a3b": ("qwen3_5_moe_text", {}),
        "kimi-linear-48b-a3b": ("kimi_linear", {}),
        "jamba-52b": ("jamba", {}),
        "granite-4.0-h-small": ("granitemoehybrid", granite),
        "nemotron-h-8b": ("nemotron_h", nemotron),
        "lfm2-1.2b": ("lfm2", {**lfm2, "layer_types": lfm2_types}),
        "mamba-2.8b": ("mamba", {**mamba, "vocab_size": 50280}),
        "mamba2-2.7b": (
            "mamba2",
            {**mamba, "vocab_size": 50288, "num_heads": 80, "n_groups": 1, "tie_word_embeddings": True},
        ),
    }


_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def _decoder(*row: int) -> dict[str, Any]:
    return dict(zip(_KEYS, row))


def _bert() -> dict[str, ModelRow]:
    """Hidden size, layers, heads, vocabulary; the feed-forward layer is four times as wide."""
    sizes = {
        "bert-base": (768, 12, 12, 30522), "bert-large": (1024, 24, 16, 30522), "mics-bert-10b": (2560, 127, 40, 32008),
        "mics-bert-15b": (2560, 190, 40, 32008), "mics-bert-20b": (5120, 64, 40, 32008),
        "mics-bert-50b": (8192, 62, 64, 32008),  # the paper gives 40 heads, which do not divide 8192
        "roberta-base": (768, 12, 12, 50265),
        "roberta-large": (1024, 24, 16, 50265),
    }  # fmt: skip
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    rows: dict[str, ModelRow] = {}
    for name, row in sizes.items():
        fields = {**dict(zip(keys, row)), "intermediate_size": 4 * row[0]}
        roberta = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        roberta |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        rows[name] = ("roberta", {**fields, **roberta}) if name.startswith("roberta") else ("bert", fields)
    return rows


def _t5() -> dict[str, ModelRow]:
    """Hidden size, size of a head, feed-forward size, layers of each half, heads."""
    sizes = {
        "t5-small": (512, 64, 2048, 6, 8), "t5-base": (768, 64, 3072, 12, 12), "t5-large": (1024, 64, 4096, 24, 16),
        "t5-3b": (1024, 128, 16384, 24, 32), "t5-11b": (1024, 128, 65536, 24, 128),
    }  # fmt: skip
    keys = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    common = {"vocab_size": 32128, "decoder_start_token_id": 0}
    return {name: ("t5", {**common, **dict(zip(keys, row))}) for name, row in sizes.items()}


def _bart() -> dict[str, ModelRow]:
    """Hidden size, layers of each half, heads, vocabulary; the feed-forward layer is four times as wide."""
    sizes = {"bart-base": (768, 6, 12, 50265), "bart-large": (1024, 12, 16, 50265)}
    return {
        name: ("bart", {
            "d_model": size, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": heads,
            "decoder_attention_heads": heads, "encoder_ffn_dim": 4 * size, "decoder_ffn_dim": 4 * size,
            "vocab_size": vocabulary,
        })
        for name, (size, layers, heads, vocabulary) in sizes.items()
    }  # fmt: skip


def _vit() -> dict[str, ModelRow]:
    """Hidden and feed-forward size, layers, heads, patch; images of 224 x 224, 1000 classes.

    `vit-g` is the 1.0 B parameter model of Zhai et al. 2022, table 2, `vit-gigantic` their ViT-G of 1.8 B.
    """
    sizes = {
        "vit-base": (768, 3072, 12, 12, 16), "vit-large": (1024, 4096, 24, 16, 16),
        "vit-huge": (1280, 5120, 32, 16, 14),
        "vit-g": (1408, 6144, 40, 16, 14), "vit-gigantic": (1664, 8192, 48, 16, 14),
    }  # fmt: skip
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    return {name: ("vit", {"num_labels": 1000, **dict(zip(keys, row))}) for name, row in sizes.items()}
