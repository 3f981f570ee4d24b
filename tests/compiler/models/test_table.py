"""The table of models by name: spellings, near misses, and the number of parameters of every row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from penstock.compiler.models.named import find_model
from penstock.compiler.models.table import find_row, known_models, near_names
from penstock.ir.errors import PlanError

# 48 names that people type, and the row of each.
POPULAR = {
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-3B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "unsloth/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3.3:70b": "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-2-7b-chat-hf": "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "meta-llama/Llama-4-Scout-17B-16E",
    "llama-4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "meta-llama/Llama-3.2-11B-Vision",
    "codellama/CodeLlama-7b-Instruct-hf": "codellama/CodeLlama-7b-hf",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B",
    "Qwen/Qwen2-1.5B": "Qwen/Qwen2-1.5B",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B",
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3.5-9B": "Qwen/Qwen3.5-9B",
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct": "Qwen/Qwen3-VL-8B-Instruct",
    "gemma-3-12b": "google/gemma-3-12b-it",
    "gemma3:4b": "google/gemma-3-4b-it",
    "google/gemma-3-270m-it": "google/gemma-3-270m",
    "google/gemma-2-9b-it": "google/gemma-2-9b",
    "google/gemma-4-31B-it": "google/gemma-4-31B-it",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Base-2407",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "microsoft/phi-4": "microsoft/phi-4",
    "phi3:mini": "microsoft/Phi-3-mini-4k-instruct",
    "openai/gpt-oss-20b": "openai/gpt-oss-20b",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "HuggingFaceTB/SmolLM2-1.7B",
    "SmolLM3": "HuggingFaceTB/SmolLM3-3B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "zai-org/GLM-4.5-Air": "zai-org/GLM-4.5-Air",
    "allenai/OLMo-2-1124-7B-Instruct": "allenai/OLMo-2-1124-7B",
    "gpt2": "openai-community/gpt2",
    "google-bert/bert-base-uncased": "google-bert/bert-base-uncased",
    "google/flan-t5-base": "google/flan-t5-base",
    "openai/whisper-large-v3": "openai/whisper-large-v3",
    "google/vit-base-patch16-224": "google/vit-base-patch16-224",
}
# Billions of parameters as published, where the name has none, another part of them, or a rounder number.
PUBLISHED = {
    "meta-llama/Llama-4-Scout-17B-16E": 109, "meta-llama/Llama-4-Maverick-17B-128E": 400,
    "mistralai/Mixtral-8x7B-v0.1": 46.7, "mistralai/Mixtral-8x22B-v0.1": 141, "allenai/OLMoE-1B-7B-0924": 6.9,
    "microsoft/phi-4": 14.7, "microsoft/phi-2": 2.7, "microsoft/Phi-3.5-MoE-instruct": 42,
    "deepseek-ai/DeepSeek-V3": 671, "deepseek-ai/DeepSeek-V4-Flash": 284, "zai-org/GLM-4.5": 355,
    "zai-org/GLM-4.5-Air": 106, "moonshotai/Kimi-K2-Instruct": 1000, "openai/whisper-tiny": 0.039,
    "openai/whisper-base": 0.074, "openai/whisper-small": 0.244, "openai/whisper-medium": 0.769,
    "openai/whisper-large-v3": 1.55, "openai/whisper-large-v3-turbo": 0.809, "google-bert/bert-base-uncased": 0.11,
    "openai-community/gpt2-xl": 1.558, "google/gemma-7b": 8.54, "tiiuae/Falcon3-1B-Base": 1.67,
    "Qwen/Qwen2-VL-7B-Instruct": 8.29, "Qwen/Qwen2.5-VL-7B-Instruct": 8.29, "mobius-15b": 12.85,
    "Qwen/Qwen3.5-0.8B": 0.752, "Qwen/Qwen3.5-2B": 1.882, "stabilityai/stablelm-base-alpha-3b": 3.64,
    "allenai/OLMo-2-0425-1B": 1.48, "Qwen/Qwen2-57B-A14B": 57.4,
    "google/flan-t5-xl": 2.85, "google/flan-t5-xxl": 11.1,
    "answerdotai/ModernBERT-large": 0.395,
}  # fmt: skip
SMALL = ("HuggingFaceTB/SmolLM2-135M", "EleutherAI/pythia-70m", "google/gemma-3-270m", "openai/whisper-tiny",
         "answerdotai/ModernBERT-large")  # fmt: skip


def size_in_name(name: str) -> float | None:
    """Billions of parameters: "Qwen3-30B-A3B" has 30, and "gemma-4-E4B" none, as it counts a part of them."""
    found = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower())
    return float(found[1]) * {"b": 1, "m": 1e-3}[found[2]] if found else None


def billions(name: str) -> float:
    return sum(p.numel() for p in find_model(name).on_meta().parameters()) / 1e9


def require_size(name: str) -> None:
    """Names round down: a model of 1B may have 1.3, one of 8B no more than 8.9."""
    found, published = billions(name), PUBLISHED.get(name)
    if published is not None:
        assert found == pytest.approx(published, rel=0.04), name
    elif (said := size_in_name(name)) is not None:
        assert 0.87 * said < found < (1.34 if said < 5 else 1.12) * said, (name, found)
    else:
        assert found > 0, name


def test_there_are_enough_with_their_sources() -> None:
    """A source is a page, a package or a paper."""
    assert len(known_models()) >= 250 and all(row.config["model_type"] for row in known_models().values())
    a_source = re.compile(r"\.(com|co)/|\(PyPI\)|(19|20)\d\d|the (Mobius|MiCS) paper")
    assert [name for name, row in known_models().items() if not a_source.search(row.source)] == ["Qwen/Qwen3.5-2B"]


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_size_in_their_names(name: str) -> None:
    require_size(name)


@pytest.mark.slow
def test_all_models_have_the_size_in_their_names() -> None:
    for name in known_models():
        require_size(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("Qwen/Qwen3.5-0.8B", 852_985_920), ("Qwen/Qwen3.5-2B", 2_213_241_664)])
def test_models_that_see_have_the_tensors_of_their_files(name: str, count: int) -> None:
    model = find_model(name, head="image-text-to-text").on_meta()
    assert isinstance(model, tuple(AutoModelForImageTextToText._model_mapping.values()))
    assert sum(p.numel() for p in model.parameters()) == count


def test_popular_names_are_known() -> None:
    assert len(POPULAR) == 48
    found = {name: find_row(name) for name in POPULAR}
    assert {name: row and row.name for name, row in found.items()} == POPULAR


def test_every_row_is_a_configuration_and_found_by_its_names() -> None:
    for name, known in known_models().items():
        for each in (name, *known.names):
            row = find_row(each)
            assert row is not None and row.config == known.config, each
        assert find_model(name).config.get_text_config().hidden_size > 0, name


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gemma-3-13b", "google/gemma-3-12b-it"),
        ("gtp2", "gpt2"),
        ("llama-3-9b", "meta-llama/Llama-3.1-8B"),
        ("qwen3-9b", "Qwen/Qwen3.5-9B"),
        ("deepseek-r1:8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
    ],
)
def test_near_misses_are_near(name: str, first: str) -> None:
    near = near_names(name)
    assert near[0] == first and not any(each.startswith("gpt3") for each in near if not name.startswith("g"))
    with pytest.raises(PlanError, match=f"no model '{name}'; did you mean {re.escape(first)}, .*--download asks"):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", "may be Qwen/Qwen3-0.6B, .*; say which"),
        ("mixtral", "may be mistralai/Mixtral-8x7B-v0.1, mistralai/Mixtral-8x22B-v0.1; say which"),
        ("./models/foo", "there is no directory .*/models/foo$"),
        ("models/foo/", "there is no directory .*/models/foo$"),
        ("~/nowhere-at-all", "there is no directory /.*nowhere-at-all$"),
        ("someone/made-this", "no model 'someone/made-this' is known, and there is no such directory"),
        ("Qwen/Qwen3-8B-AWQ", r"packed \(awq\).* To plan: Qwen/Qwen3-8B with --adapter"),
        ("unsloth/Llama-3.2-3B-Instruct-GGUF", r"packed \(gguf\)"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "add --adapter lora:r=16, or name unsloth/Llama-3.2-3B-Instruct"),
    ],
)
def test_a_name_that_is_refused_gets_the_reason(name: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        find_model(name)


def test_files_of_bitsandbytes_are_a_base_of_nf4() -> None:
    named = find_model("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit", adapter="lora:r=8")
    assert named.base == "nf4" and named.config.hidden_size == 3072


def test_dimensions_change_after_a_tag_too() -> None:
    named = find_model("llama3.2:3b:num_hidden_layers=2")
    assert (named.config.num_hidden_layers, named.config.hidden_size) == (2, 3072)


def test_a_directory_counts_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_model("gpt2:n_layer=1,n_embd=64,n_head=2").config.save_pretrained(tmp_path / "Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    assert find_model("Qwen3-8B").config.n_layer == 1


@pytest.mark.slow
def test_recordings_have_the_length_that_the_encoder_takes() -> None:
    named = find_model("whisper-tiny")
    assert named.batch_spec(2, 64)["input_features"]["shape"] == [2, 80, 3000]
    assert named.items(2, 64) == (2, "recording")
    with pytest.raises(PlanError, match="has 448 positions"):
        named.batch_spec(2, 512)
    small = find_model("whisper-tiny:encoder_layers=1,decoder_layers=1,d_model=48")
    assert small.load()(**small.random_batch(2, 8)).loss.isfinite()


def test_rows_of_models_that_see_are_text() -> None:
    named = find_model("Qwen/Qwen2.5-VL-3B-Instruct")
    assert named.head == "image-text-to-text" and named.has_vision and not find_model("gpt2").has_vision
    assert set(named.random_batch(2, 16)) == {"input_ids", "attention_mask", "labels"}
