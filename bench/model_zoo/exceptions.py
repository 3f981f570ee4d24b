"""Families whose own defaults cannot be built, or whose fields depend on one another: what they are given, and why."""

from __future__ import annotations

from typing import Any


def _sections(*parts: int) -> dict[str, Any]:
    """Shares of a head's frequencies, where the model's code has the default instead of its configuration."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(parts)}}


def _with_resnet(*stages: str) -> dict[str, Any]:
    sizes = {"hidden_sizes": [64] * 4, "depths": [1] * 4, "embedding_size": 64, "layer_type": "basic"}
    backbone = {"model_type": "resnet", "out_features": list(stages), **sizes}
    return {"use_timm_backbone": False, "backbone_config": backbone}


BACKBONES = {
    "Detr": ["stage4"], "ConditionalDetr": ["stage4"], "DabDetr": ["stage4"], "TableTransformer": ["stage4"],
    "DeformableDetr": ["stage2", "stage3", "stage4"], "OmDetTurbo": ["stage2", "stage3", "stage4"],
}  # fmt: skip

# By the name of the configuration's class, also of a nested one.
CHANGES: dict[str, dict[str, Any]] = {
    # heads x width of a head = expand x width
    "Mamba2Config": {"num_heads": 8},
    "FalconH1Config": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    # a hybrid whose defaults have one kind of layer, or say the layers by number
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "KimiLinearConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "BailingHybridConfig": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
                            "num_local_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
                           "indexer_compress_ratio": 4},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "SamVisionConfig": {"global_attn_indexes": [1]},
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2]},
    "CvtConfig": {"depth": [1, 2, 3]},
    "Dots3NoteVisionConfig": {"num_hidden_layers": 2, "pyramid_num_routed": [-1, 8]},
    "LwDetrConfig": {"projector_scale_factors": [1.0]},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "Zamba2Config": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
                     "num_mem_blocks": 1},
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "CohereCompassTextConfig": {"rope_parameters": {kind: _sections(2, 3, 3)["rope_parameters"]
                                                    for kind in ("full_attention", "sliding_attention")}},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "Granite4VisionConfig": {"deepstack_layer_map": [(-1, 0)], "downsample_rate": "1/2"},
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    # no default that can be built
    "BltConfig": {"use_cache": False},
    "DoryConfig": {"use_cache": False},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Sapiens2Config": {"head_config": {"upsample_out_channels": [64], "upsample_kernel_sizes": [4],
                                       "conv_out_channels": [64], "conv_kernel_sizes": [1]}},
    "Tipsv2DptConfig": {"neck_hidden_sizes": [64] * 4, "fusion_hidden_size": 64},
    "Tipsv2VisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "HunYuanVLTextConfig": {"head_dim": 16, **_sections(2, 3, 3)},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "MinistralConfig": {"head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Wav2Vec2BertConfig": {"vocab_size": 32},
    "Wav2Vec2ConformerConfig": {"vocab_size": 32, "max_source_positions": 128},
    "EsmConfig": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "Dots1Config": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 126}},
    "Emu3Config": {"vocabulary_map": {"<image>": 126, "<|extra_200|>": 125}},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 90, "vision_end_token_id": 91},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 90, "vision_end_token_id": 91},
    "Step3p7TextConfig": {"sliding_window": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "VisionEncoderDecoderConfig": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "SpeechEncoderDecoderConfig": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    # widths that are products of others
    "PerceiverConfig": {"max_position_embeddings": 12, "num_cross_attention_heads": 1},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "Glm5NextTextConfig": {"index_topk": 16},
    "Llama4VisionConfig": {"intermediate_size": 256},
    # shares of a head's frequencies
    "Qwen2VLTextConfig": _sections(2, 3, 3),
    "Qwen2_5_VLTextConfig": _sections(2, 3, 3),
    "Qwen2_5OmniTextConfig": _sections(2, 3, 3),
    "PaddleOCRTextConfig": _sections(2, 3, 3),
    "Ernie4_5_VLMoeTextConfig": _sections(3, 3, 2),
    "Glm4vTextConfig": _sections(2, 3, 3),
    "Glm4vMoeTextConfig": _sections(1, 1, 2),
    "GlmOcrTextConfig": _sections(2, 3, 3),
    "GlmImageTextConfig": _sections(2, 3, 3),
    "Cosmos3EdgeTextConfig": _sections(4, 2, 2),
    "HYV4VLTextConfig": _sections(4, 2, 2),
    # rows of 12 tokens are shorter than its blocks
    "BigBirdConfig": {"attention_type": "original_full"},
    "BigBirdPegasusConfig": {"attention_type": "original_full"},
    "ReformerConfig": {"axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 48], "lsh_attn_chunk_length": 4,
                       "local_attn_chunk_length": 4},
    "ASTConfig": {"max_length": 64},
    # sound has more frames than its table has places
    "SeamlessM4TConfig": {"max_source_positions": 128},
    "LEDConfig": {"attention_window": 4},
    "RoCBertConfig": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    # a backbone of transformers in the place of timm's
    **{f"{name}Config": _with_resnet(*stages) for name, stages in BACKBONES.items()},
}  # fmt: skip
# By the name of the class.
FOR_CLASS: dict[str, dict[str, Any]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
}
