"""Adapters by text: what is put on, what is trained, and what is said of mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.compiler.models.adapters import LoraChoice, linear_names
from penstock.compiler.models.named import find_model
from penstock.errors import PlanError
from penstock.runtime.quantised.model import with_bytes
from penstock.runtime.state.quantised import unquantised_note

SMALL = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,vocab_size=64"
LLAMA = f"llama-8b:{SMALL},num_key_value_heads=2"
BERT = f"bert-base:{SMALL},max_position_embeddings=32"


def test_all_options_are_read() -> None:
    found = LoraChoice.parse("lora:r=4, alpha=3,targets=q_proj+v_proj,dora,rslora")
    assert found == LoraChoice(4, 3.0, ("q_proj", "v_proj"), dora=True, rslora=True)
    assert LoraChoice.parse("lora") == LoraChoice()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ia3", "allowed is lora with options, such as lora:r=16,alpha=32,targets="),
        ("lora:rank=4", "'rank=4' is none of its options"),
        ("lora:dora=yes", "'dora=yes' is none"),
        ("lora:r=0", "r=0; allowed is a number above 0"),
        ("lora:alpha=much", "alpha=much; allowed"),
        ("lora:alpha=inf", "alpha=inf; allowed"),
        ("lora:alpha=nan", "alpha=nan; allowed"),
        ("lora:targets=", "none of its options"),
        ("lora:r=8,r=4", "'lora:r=8,r=4': r is given twice; leave one of them out"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_model("gpt2", adapter=text)


@pytest.mark.parametrize("dora", [False, True])
def test_on_meta_nothing_is_made(dora: bool) -> None:
    text = "lora:r=4,targets=q_proj" + ",dora" * dora
    model: Any = find_model(LLAMA, adapter=text).on_meta()
    assert all(p.is_meta for p in model.parameters())
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == 2 * (2 * 4 * 32 + 32 * dora) and all("q_proj.lora_" in name for name in trained)
    config = model.peft_config["default"]
    assert (config.lora_alpha, config.use_dora, config.task_type) == (8, dora, "CAUSAL_LM")
    assert model.training


def test_the_new_head_of_a_classifier_is_trained() -> None:
    model: Any = find_model(BERT, head="classification", num_labels=3, adapter="lora:r=2").on_meta()
    heads = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert heads and all(".classifier.modules_to_save.default." in name for name in heads)


def test_without_targets_those_of_peft_or_all_linear_layers_are_taken() -> None:
    own: Any = find_model(LLAMA, adapter="lora").on_meta()
    assert {n.split(".")[-4] for n, p in own.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    every: Any = find_model(LLAMA, adapter="lora:targets=all-linear").on_meta()
    found = {n.split(".")[-4] for n, p in every.named_parameters() if p.requires_grad}
    assert found == set(linear_names(find_model(LLAMA).on_meta())) - {"lm_head"}


def test_a_target_that_matches_nothing_is_answered_by_the_models_own_names() -> None:
    with pytest.raises(PlanError) as caught:  # PEFT itself leaves one of several out without a word
        find_model(LLAMA, adapter="lora:targets=q_proj+vproj").on_meta()
    assert "targets=vproj matches no layer; did you mean v_proj" in str(caught.value)
    assert "q_proj (2), k_proj (2), v_proj (2), o_proj (2), gate_proj (2)" in str(caught.value)
    with pytest.raises(PlanError, match=r"c_attn \(12\), c_proj \(24\), c_fc \(12\)"):
        find_model("gpt2", adapter="lora:targets=query").on_meta()


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (f"qwen3-30b-a3b:{SMALL},num_key_value_heads=2,moe_intermediate_size=64,num_experts=4,head_dim=8", "90%"),
        (f"llama-8b:{SMALL},num_key_value_heads=2", ""),
    ],
)
def test_experts_that_a_base_leaves_whole_are_said(name: str, note: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = with_bytes(find_model(name, adapter="lora:r=2,targets=q_proj", base="nf4").on_meta())
    found = unquantised_note(model)
    assert found.startswith(note) and bool(found) == bool(note), found
    if note:
        assert "the largest is base_model.model.model.layers.0.mlp.experts.gate_up_proj [4, 128, 32]" in found


def test_layers_that_kernels_read_have_no_adapters() -> None:
    """PEFT refuses them, and plans without PEFT leave them out."""
    small = "hidden_size=64,num_hidden_layers=1,vocab_size=64,num_heads=8,head_dim=16,state_size=8"
    found = find_model(f"mamba2-2.7b:{small}", adapter="lora:r=2")
    names = [
        {name.rpartition(".lora_")[0].rpartition(".")[2] for name, param in model.named_parameters() if "lora_" in name}
        for model in (found.on_meta(), found.describe())
    ]
    assert names == [{"in_proj"}] * 2
    with pytest.raises(PlanError, match=r"targets=out_proj: kernels of mamba2 models read .*; allowed are in_proj"):
        find_model(f"mamba2-2.7b:{small}", adapter="lora:targets=in_proj+out_proj").on_meta()
