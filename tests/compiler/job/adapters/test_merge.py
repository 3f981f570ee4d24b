"""A merged model is loaded by transformers alone, with nothing missing or unexpected, and computes what was trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.runtime.state import durable, merged
from penstock.tests.compiler.job.adapters.adapted_models import (
    BATCH,
    IDS,
    MODELS,
    compile_job,
    llama,
    lora,
)
from penstock.tests.runtime.state.test_pretrained import on_meta
from penstock.tests.shown_elsewhere import slow_but

# W x + B (A x) and (W + B A) x differ by the rounding of fp32 in the sum and in the product B A: 2^-24 of the largest
# term each, over 2 layers with rows of 64.
TOLERANCE = 2e-5


def tie(**options: Any) -> Callable[[], Any]:
    return lambda: lora(llama(tie_word_embeddings=True), **options)


TIED = {
    "tied embedding": tie(target_modules=["embed_tokens", "q_proj"]),
    "tied head": tie(modules_to_save=["lm_head"]),
    "gpt2": lambda: lora(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
}
CASES = {name: make for name, make in {**MODELS, **TIED}.items() if "checkpointing" not in name}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def load(directory: Path, model: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    found, info = kind.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert type(found) is type(model.get_base_model()) and not hasattr(found, "peft_config")
    if hasattr(found, "set_experts_implementation") and "moe" in type(found).__name__.lower():
        found.set_experts_implementation("batched_mm")
    return found.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(["dora"], CASES))
def test_the_merged_model_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    model = CASES[name]()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    with compile_job(model) as job:
        for _ in range(2):
            job.step(BATCH)
        job.save_pretrained(tmp_path / "merged", merge=True)
        assert all(torch.equal(value, base[key]) for key, value in model.state_dict().items())  # untouched until now
        job.sync()
    assert not list((tmp_path / "merged").glob("adapter*"))
    found, expected = logits(load(tmp_path / "merged", model)), logits(model)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    with model.disable_adapter():
        assert (found - logits(model)).abs().max() > 100 * TOLERANCE * expected.abs().max()


def test_merging_is_that_of_peft(tmp_path: Path) -> None:
    model = lora(llama(num_hidden_layers=1), use_dora=True, use_rslora=True)
    with compile_job(model) as job:
        job.step(BATCH)
        job.save_pretrained(tmp_path, merge=True)
        job.sync()
    found = load(tmp_path, model).state_dict()
    expected = model.merge_and_unload(safe_merge=True).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_stages_of_a_swapped_base_on_meta_are_merged_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama().save_pretrained(tmp_path / "base")
    held: list[int] = []
    merge = merged.AdaptedLayer.merge

    def count(layer: merged.AdaptedLayer) -> dict[str, Tensor]:
        held.append(sum(t.numel() for t in layer.given.values()))
        return merge(layer)

    monkeypatch.setattr(merged.AdaptedLayer, "merge", count)
    model = lora(on_meta(llama), init_lora_weights=True)
    job = compile_job(model, weights=tmp_path / "base", strategy="mobius", memory="150kB")
    with pytest.warns(UserWarning, match="absent and start from"), job:
        job.step(BATCH)
        job.save_pretrained(tmp_path / "merged", merge=True)
        job.sync()
    assert len(held) == 4 and max(held) == 32 * 32 + 2 * 4 * 32  # one projection with its adapter
    found, expected = logits(load(tmp_path / "merged", model)), logits(model)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.slow
def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    with (
        compile_job(llama(num_hidden_layers=1)) as job,
        pytest.raises(PlanError, match="LlamaForCausalLM has no adapters of PEFT to merge"),
    ):
        job.save_pretrained(tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_adapters_that_change_no_weights_are_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        llama(num_hidden_layers=1), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with compile_job(model) as job, pytest.raises(PlanError, match=re.escape("PROMPT_TUNING are no change of weights")):
        job.save_pretrained(tmp_path / "merged", merge=True)


@pytest.mark.slow
def test_numbers_that_are_not_finite_leave_the_directory_as_it_was(tmp_path: Path) -> None:
    model = lora(llama(num_hidden_layers=1))
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data[0, 0] = float("inf")
    with compile_job(model) as job, pytest.raises(PlanError, match=r"self_attn\.q_proj: NaNs detected"):
        job.save_pretrained(tmp_path / "merged", merge=True)
    assert durable.names_in(tmp_path) == []
