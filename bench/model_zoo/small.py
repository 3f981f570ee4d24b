"""Tiny configurations, made of a configuration class's own defaults by one rule for all families.

A field is known by its name: widths become 64, heads 4, layers 2, vocabularies 128, and so on. Equal widths stay equal,
also between nested configurations, and 4 heads of 16 make a width of 64. What a class derives of its other fields is
left to it. There is a layer of each kind that the defaults have.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PretrainedConfig

from .exceptions import CHANGES

WIDTH, HEADS, HEAD_WIDTH, VOCABULARY = 64, 4, 16, 128
MOST_LAYERS = 8
# Tokens that padding, images and sound need, also where a class has no default for them.
MISSING_IDS = ("pad_token_id", "image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
# Names of integer fields (whole names, `*` any part) and what they become; the first that matches counts.
RULES: tuple[tuple[str, Any], ...] = (
    ("mm_tokens_per_image|patches_per_side", 4),
    ("latent_query", 8),
    ("kernel|stride|ratio|factor|group_size|shape|codebook_dim|n_fft|hop|^in_channels|^num_channels|num_labels", None),
    ("window_size", "window"),
    ("spatial_merge_size|temporal_patch_size|merge_size|tokens_per|d_conv|downsampl|duration", None),
    ("hash_byte_group_vocab|vocab_size|vocabulary_size|n_vocab|entity_vocab", "vocabulary"),
    ("num_key_value_heads|num_kv_heads|n_head_kv|num_kv_head", "kv_heads"),
    ("linear_num_value_heads|linear_num_key_heads", "half_heads"),
    ("mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    ("num_heads|attention_heads|n_heads?$|num_head$|_heads$|^num_attention_groups", "heads"),
    ("head_dim|rotary_dim|d_kv|head_size|d_head|key_length|attention_key_size|query_pre_attn", HEAD_WIDTH),
    ("lora_rank|rank_dim|low_rank|_rank$", 16),
    ("expert_layer|moe_layer|layer_(period|offset|freq|step|start|end|id)|_interval|sparse_step|_every", None),
    ("first_k_dense|num_dense_layers|num_hash_layers", "one"),
    ("layers?$|num_blocks|self_attends_per_block|^depth$|n_layer|num_block|_depth$|num_hidden_layers", "layers"),
    ("topk_group|n_groups?$|num_groups?$", "groups"),
    ("n_shared_experts|num_shared_experts", "one"),
    ("experts_per_tok|top_k|topk|num_selected|experts_per|active_experts", "two"),
    ("n?_?experts$|num_.*experts|experts_num", 8),
    ("state_size|d_state|ssm_state|mamba_d_state|num_memory|n_state", 8),
    ("chunk_size|sliding_window|local_window", 8),
    ("image_size|img_size|input_size", "image"),
    ("num_queries|num_query|num_latents|query_tokens|two_stage_num_proposals|num_feature_points|num_denoising", 16),
    ("max_source_positions|max_audio_positions", 16),
    ("conv_pos_embeddings$|conv_pos_embedding_groups", 16),
    ("max_position|n_positions|max_.*positions|max_.*length|n_ctx|seq_len|context_length", "positions"),
    ("intermediate|ffn|d_ff|mlp_dim|inner_dim|n_inner|feedforward|hidden_mult|fc_dim", 2 * WIDTH),
    ("upsample_groups|d_latents|size$|dim$|dims$|d_model|n_embd|_size|_dim|channels$|channel$|width|hidden|embed|d_inner|feature_size|planes",
     "width"),
)  # fmt: skip
COMPILED = tuple((re.compile(names), value) for names, value in RULES)
UNTOUCHED = re.compile(
    r"patch|token_id|_index|_id$|_ids$|num_mel|sampling|fps|frame|bins|depths_|pool|crop|prob|version"
)
DROPOUT = re.compile(r"dropout|drop_rate|drop_prob|drop_path|layerdrop|pdrop")


def small_config(config_class: type[PretrainedConfig], widths: str = "small", **changes: Any) -> PretrainedConfig:
    """The defaults of a class, made small. widths "kept": only layers, vocabularies and the like become small."""
    shrink = _Shrink(widths == "kept")
    return shrink.config(config_class(), changes)


class _Shrink:
    """One whole configuration. `ids`: tokens beyond the small vocabulary, each with its new place in it."""

    def __init__(self, keep_widths: bool):
        self.keep_widths = keep_widths
        self.ids: dict[int, int] = {}

    def config(self, config: PretrainedConfig, changes: dict[str, Any]) -> PretrainedConfig:
        usual = _usual_values(type(config))
        layers = self._num_layers(config)
        old_layers = get(config, "num_hidden_layers")
        fields: dict[str, Any] = {}
        for name in MISSING_IDS:
            if getattr(config, name, 0) is None:
                fields[name] = 0 if name == "pad_token_id" else self._id(-MISSING_IDS.index(name))
        if get(config, "is_encoder_decoder") and get(config, "decoder_start_token_id") is None:
            fields["decoder_start_token_id"] = 0
        if get(config, "depths") and get(config, "_out_features"):
            fields["out_features"] = list(config.out_features)  # what a class around it asks of a backbone
        for name, of in (get(config, "sub_configs") or {}).items():
            if "vision" in name and get(config, name, 0) is None and issubclass(of, PretrainedConfig):
                fields[name] = self.config(of(), {})
        for name, value in vars(config).items():
            if name.startswith("_") or name in ("id2label", "label2id", "transformers_version", "dtype"):
                continue
            if isinstance(value, PretrainedConfig):
                fields[name] = self.config(value, {})
                continue
            small = self._value(name, value, config, layers, old_layers)
            is_derived = usual.get(name) is None
            if "pinpoints" in name or self._is_id(name):
                is_derived = False
            if not is_derived and (small != value or usual.get(name) != value):
                fields[name] = small
        return type(config)(**{**fields, **CHANGES.get(type(config).__name__, {}), **changes})

    def _value(self, name: str, value: Any, config: PretrainedConfig, layers: int, old_layers: int | None) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)) and DROPOUT.search(name):
            return type(value)(0)
        if isinstance(value, (list, tuple)) and DROPOUT.search(name):
            return type(value)(0.0 for _ in value)
        if name == "pos_embed_rescale":
            return None  # by a number that training draws
        if isinstance(value, float):
            return 0.0 if re.search(r"^mask_\w+_prob$|jitter|noise", name) else value
        if self._is_id(name):
            if isinstance(value, list):
                return [self._id(each) if isinstance(each, int) else each for each in value]
            return self._id(value) if isinstance(value, int) else value
        if isinstance(value, int):
            return self._integer(name, value, config, layers)
        if isinstance(value, dict) and "rope" in name:
            return self._rope(value, config)
        if isinstance(value, (list, tuple)) and value:
            return self._list(name, value, config, layers, old_layers)
        if isinstance(value, str) and old_layers and len(value) == old_layers and len(value) > 4:
            return value[:layers]
        return value

    @staticmethod
    def _is_id(name: str) -> bool:
        return bool(re.search(r"token_ids?$|token_index$|^(pad|bos|eos|image|video|audio)_\w*(id|index)$", name))

    def _id(self, value: int) -> int:
        if 0 <= value < VOCABULARY - 32:
            return value
        return self.ids.setdefault(value, VOCABULARY - 1 - len(self.ids))

    def _rope(self, value: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
        """Parameters of rotary positions, also one set per kind of layer."""
        return {
            key: self._rope(each, config) if isinstance(each, dict)
            else self._sections(each, config) if "section" in key and each else each
            for key, each in value.items()
        }  # fmt: skip

    def _sections(self, value: Any, config: PretrainedConfig) -> Any:
        """The shares of a head's frequencies that time, height and width have, in the same ratio."""
        if self.keep_widths:
            return value
        head = get(config, "head_dim") or get(config, "qk_rope_head_dim")
        head = head or get(config, "hidden_size", 1) // (get(config, "num_attention_heads") or 1)
        parts = [each * HEAD_WIDTH // head for each in value]
        parts[0] += sum(value) * HEAD_WIDTH // head - sum(parts)
        return parts

    def _list(self, name: str, value: Any, config: PretrainedConfig, layers: int, old_layers: int | None) -> Any:
        is_per_layer = (old_layers and old_layers > 4) or re.search(r"layer|type|pattern", name)
        if len(value) == old_layers and old_layers > layers and is_per_layer:
            return type(value)(value[:layers])
        if "section" in name:
            return self._sections(value, config)
        if "pinpoints" in name:
            return [[64, 64]]
        if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            if re.search(r"heads", name):
                return type(value)(min(each, 2) for each in value)
            if re.search(r"depths?$|num_layers|layers_per|num_blocks|^layers$|block_repeats|layer_depth", name):
                return type(value)(1 if each else 0 for each in value)
            if name in ("out_features", "out_indices", "_out_indices", "layers_to_share"):
                return value
            return type(value)(self._integer(name, each, config, layers) for each in value)
        return value

    def _integer(self, name: str, value: int, config: PretrainedConfig, layers: int) -> int:
        if value <= 1 or UNTOUCHED.search(name):
            return value
        found = next((small for names, small in COMPILED if names.search(name)), None)
        if found is None:
            return value
        if self.keep_widths and (found in ("width", "heads", "kv_heads", "half_heads", HEAD_WIDTH, 2 * WIDTH)):
            return value
        if isinstance(found, int):
            return min(value, found)
        return getattr(self, f"_{found}")(value, config, layers)

    def _vocabulary(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return min(value, VOCABULARY)

    def _heads(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return 2 if value == 2 or value % 2 else min(value, HEADS)

    def _half_heads(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return 4 if value >= 32 else 2

    def _kv_heads(self, value: int, config: PretrainedConfig, layers: int) -> int:
        heads = get(config, "num_attention_heads", value)
        return HEADS if value == heads else 2

    def _layers(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return min(value, layers)

    def _one(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return 1

    def _two(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return 2

    def _groups(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return 2

    def _positions(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return min(value, 512)

    def _image(self, value: int, config: PretrainedConfig, layers: int) -> int:
        patch = get(config, "patch_size")
        patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
        return min(value, max(64, 4 * patch) if isinstance(patch, int) else 64)

    def _window(self, value: int, config: PretrainedConfig, layers: int) -> int:
        """Windows of images: 2 patches divide each of the sizes that the stages have."""
        return 2 if get(config, "patch_size") and value < 64 else value

    def _width(self, value: int, config: PretrainedConfig, layers: int) -> int:
        return min(value, WIDTH)

    @staticmethod
    def _num_layers(config: PretrainedConfig) -> int:
        """The fewest layers, at least 2, that have every kind that the defaults' pattern has."""
        patterns = [
            value for name, value in vars(config).items()
            if isinstance(value, (list, tuple)) and re.search(r"type|pattern", name) and len(value) > 2
            and all(isinstance(each, str) for each in value)
        ]  # fmt: skip
        pattern = patterns[0] if patterns else []
        if isinstance(get(config, "attn_layer_period"), int):
            return min(max(2, get(config, "attn_layer_offset", 0) + 1), MOST_LAYERS)
        seen: set[str] = set()
        kinds = set(pattern)
        for number, kind in enumerate(pattern, 1):
            seen.add(kind)
            if seen == kinds:
                return max(2, min(number, MOST_LAYERS))
        return 2


def get(config: Any, name: str, default: Any = None) -> Any:
    """A field by name or by its alias; the default also where each layer has its own."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def _usual_values(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The defaults of a class's arguments, before it derives any."""
    if not dataclasses.is_dataclass(config_class):
        return {}
    fields = dataclasses.fields(config_class)
    usual = {f.name: f.default if f.default is not dataclasses.MISSING else None for f in fields}
    return {**usual, **{name: usual[alias] for alias, name in config_class.attribute_map.items() if alias in usual}}
