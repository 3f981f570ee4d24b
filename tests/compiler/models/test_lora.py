"""Planning adapters where neither PEFT nor bitsandbytes can be imported: the plans are those with both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.cli.task import compile_task
from penstock.compiler.models.lora import TARGETS
from penstock.compiler.models.named import NamedModel, find_model
from penstock.errors import PlanError
from penstock.ir.program.text import print_program
from penstock.runtime.quantised.model import with_bytes

SIZES = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,vocab_size=64"
LLAMA = f"llama-8b:{SIZES},num_key_value_heads=2"
BERT = f"bert-base:{SIZES},max_position_embeddings=32"
GPT2 = "gpt2:n_embd=64,n_layer=2,n_head=4,vocab_size=64,n_positions=32"
EXPERTS = f"qwen3-30b-a3b:{SIZES},num_key_value_heads=2,moe_intermediate_size=64,num_experts=4,head_dim=16"
T5 = "t5-small:num_layers=1,num_decoder_layers=1,d_model=64,d_ff=64,vocab_size=64"
VIT = "vit-base:num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=4"

Hide = Callable[..., None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Let libraries be missing."""
    return lambda *names: [monkeypatch.setitem(sys.modules, name, None) for name in names] and None


def params(model: nn.Module) -> dict[str, Any]:
    return {name: (p.shape, p.dtype, p.requires_grad, p.device) for name, p in with_bytes(model).named_parameters()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LLAMA, {"adapter": "lora:r=3"}),
        (LLAMA, {"adapter": "lora:targets=all-linear", "base": "nf4"}),
        (LLAMA, {"adapter": "lora:targets=q_proj+mlp.up_proj", "base": "int8"}),
        (LLAMA, {"adapter": "lora", "head": "classification", "num_labels": 3}),
        (BERT, {"adapter": "lora:targets=all-linear", "head": "classification", "num_labels": 3}),
        (BERT, {"adapter": "lora:r=2", "head": "classification", "num_labels": 3}),
        (GPT2, {"adapter": "lora", "base": "nf4"}),
        (GPT2, {"adapter": "lora:targets=all-linear"}),
        (T5, {"adapter": "lora"}),
        (VIT, {"adapter": "lora:r=4", "head": "image-classification", "num_labels": 3}),
        (EXPERTS, {"adapter": "lora:targets=q_proj+o_proj", "base": "nf4"}),
    ],
)
def test_parameters_are_those_of_the_libraries(hide: Hide, name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    expected = params(find_model(name, **options).on_meta())
    hide("peft", "bitsandbytes")
    found = params(find_model(name, **options).describe())
    assert found == expected and list(found) == list(expected)
    assert any(trained for _, _, trained, _ in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "options"),
    [
        (LLAMA, "bf16-true", {"adapter": "lora:r=4,rslora", "base": "nf4"}),
        (GPT2, "bf16-mixed", {"adapter": "lora:r=4,alpha=3"}),
        (LLAMA, "bf16-mixed", {"adapter": "lora:r=4", "base": "int8"}),
    ],
)
def test_plans_are_those_with_the_libraries(hide: Hide, name: str, precision: str, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")

    def plan(make: Callable[[NamedModel], nn.Module]) -> penstock.Job:
        named = find_model(name, **options)
        return penstock.compile(
            make(named), "rtx4090x1", example_inputs=named.batch_spec(4, 16), precision=precision,
            micro_batches=1, strategy="mobius",
        )  # fmt: skip

    expected = plan(NamedModel.on_meta)
    hide("peft", "bitsandbytes")
    found = plan(NamedModel.describe)
    assert found.plan == expected.plan
    texts = [[print_program(program) for program in job.programs] for job in (found, expected)]
    assert texts[0] == texts[1]


def test_either_library_may_be_missing(hide: Hide) -> None:
    pytest.importorskip("bitsandbytes")
    expected = params(find_model(LLAMA, adapter="lora", base="nf4").on_meta())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)
        assert params(find_model(LLAMA, adapter="lora", base="nf4").describe()) == expected
    hide("peft")
    assert params(find_model(LLAMA, adapter="lora", base="nf4").describe()) == expected


@pytest.mark.slow
def test_a_plan_of_plain_factors_imports_neither_library() -> None:
    code = (
        "import sys; from penstock.cli.options import JobOptions; "
        f"JobOptions(model={LLAMA!r}, hardware=['rtx4090x1'], batch=2, sequence=16, adapter='lora', base='nf4', "
        "strategy='mobius').compile(); print(sorted({'peft', 'bitsandbytes'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_more_than_plain_factors_are_planned_with_the_libraries() -> None:
    pytest.importorskip("bitsandbytes")
    for name, adapter, base in ((LLAMA, "lora:r=2,dora", "bf16"), (EXPERTS, "lora:targets=all-linear", "nf4")):
        named = find_model(name, adapter=adapter, base=base)
        assert params(named.describe()) == params(named.on_meta())
    for base in ("int8", "nf4"):
        with pytest.raises(PlanError, match=f"dora on --base {base}: .*plan it on --base bf16, or leave dora out"):
            find_model(LLAMA, adapter="lora:dora", base=base).describe()


def test_layers_with_adapters_are_those_that_peft_chooses() -> None:
    peft = pytest.importorskip("peft")
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {model_type: names for model_type, names in known.items() if isinstance(names, list)} == TARGETS


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [
        (LLAMA, "lora:dora", r"dora: peft is not installed.*'penstock\[adapters,bitsandbytes\]', or leave dora out"),
        (EXPERTS, "lora:targets=all-linear", r"experts is a .*and peft.* is not installed.*such as targets=q_proj"),
        (LLAMA, "lora:targets=embed_tokens", r"embed_tokens is a Embedding, and peft.*pip install 'penstock\[adap"),
    ],
)
def test_what_takes_more_than_two_factors_names_peft(hide: Hide, name: str, adapter: str, message: str) -> None:
    hide("peft")
    with pytest.raises(PlanError, match=message):
        find_model(name, adapter=adapter).describe()
    find_model(name, adapter="lora:targets=q_proj+v_proj").describe()  # the way out


def test_a_run_names_the_library_that_it_lacks(hide: Hide) -> None:
    named = find_model(LLAMA, adapter="lora", base="nf4")
    hide("peft")
    for run in (named.load, lambda: compile_task(None, type("Task", (), {"named": named}), None)):  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"which is not installed here: pip install 'penstock\[ad|has no weights"):
            run()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "peft")
        patch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(PlanError, match=r"pip install 'penstock\[bitsandbytes\]'"):
            named.require_libraries()


def test_described_layers_compute_what_peft_computes(hide: Hide) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    named = find_model(LLAMA, adapter="lora:r=4,targets=all-linear")
    theirs = named.load().requires_grad_(True)
    hide("peft")
    own = named.describe().to_empty(device="cpu").requires_grad_(True)
    own.load_state_dict({name: torch.randn_like(value) / 8 for name, value in theirs.state_dict().items()})
    theirs.load_state_dict(own.state_dict())
    for name, buffer in theirs.named_buffers():
        own.get_buffer(name).copy_(buffer)
    batch = named.random_batch(2, 8)
    losses = [model.train()(**batch).loss for model in (own, theirs)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, mine), their in zip(own.named_parameters(), theirs.parameters()):
        assert torch.equal(mine.grad, their.grad), name
