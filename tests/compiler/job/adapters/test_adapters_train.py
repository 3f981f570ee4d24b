"""Adapters of PEFT train through the public API as they do in eager PyTorch, and what is frozen stays as it is."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch

import penstock
from penstock.tests.compiler.eager_baseline import Eager, assert_close, assert_same_states
from penstock.tests.compiler.job.adapters.adapted_models import (
    BATCH,
    MODELS,
    compile_job,
    input_gradients,
    llama,
    lora,
)
from penstock.tests.shown_elsewhere import slow_but

# Gradients of micro-batches are added up in eager's order, but a stage's compiled text may add the two paths of a
# layer, its base and its adapter, in the other order: each addition rounds by at most 2^-24 of the running sum.
TOLERANCE = 5e-6


def assert_trains(model: Any, steps: int = 3, **options: Any) -> None:
    eager = Eager(model)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    with compile_job(model, **options) as job:
        assert bool(job.plan.decisions.fetch) == (options.get("strategy") == "mobius")
        for _ in range(steps):
            assert_close({"loss": job.step(BATCH)}, {"loss": eager.step(BATCH)}, 1e-6)
        assert_same_states(job, eager, TOLERANCE)
        found = job.state_dict()
        assert_close(found, eager.model.state_dict(), TOLERANCE)
        job.sync()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and frozen
    for name, value in frozen.items():
        assert torch.equal(found[name], value) and torch.equal(model.get_parameter(name), value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_but(["tied tokens"], MODELS),
)
@pytest.mark.filterwarnings("ignore:.*gradient checkpointing")
def test_adapters_train_as_in_eager(name: str) -> None:
    assert_trains(MODELS[name]())


@pytest.mark.parametrize("name", slow_but(["lora"], ["lora", "dora", "tied tokens", "head", "experts of mixtral"]))
def test_adapters_of_a_swapped_model_train_as_in_eager(name: str) -> None:
    memory = "1400kB" if "experts" in name else "150kB"  # for one of its two stages
    assert_trains(MODELS[name](), strategy="mobius", memory=memory)


@pytest.mark.slow  # test_staying.py has adapters on two devices
@pytest.mark.multi
@pytest.mark.parametrize("name", ["lora", "tied tokens"])
def test_adapters_on_two_devices_train_as_in_eager(name: str) -> None:
    assert_trains(MODELS[name](), strategy="gpipe", num_devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointing", "reentrant checkpointing"])
def test_gradient_checkpointing_is_ignored_and_this_is_said(name: str) -> None:
    with pytest.warns(UserWarning, match="asks for gradient checkpointing.*is ignored: the plan itself decides"):
        job = compile_job(MODELS[name]())
    model = input_gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = compile_job(model)
    # The plan is that of the model without it: nothing runs twice unless the plan says so.
    assert job.plan.hash == plain.plan.hash
    assert job.code(0).partition("def step(")[2] == plain.code(0).partition("def step(")[2]


@pytest.mark.slow
def test_gradients_of_inputs_that_a_hook_asks_for_are_not_computed() -> None:
    model = MODELS["input gradients"]()
    with_hook, without = compile_job(model, num_devices=2), compile_job(MODELS["last layer"](), num_devices=2)
    assert with_hook.code(0).count("rt.backward(") == without.code(0).count("rt.backward(") == 0
    assert with_hook.code(1).count("rt.backward(") == without.code(1).count("rt.backward(") > 0


@pytest.mark.slow
def test_dropout_of_adapters_draws_the_numbers_of_eager() -> None:
    model = lora(llama(), lora_dropout=0.2)
    with compile_job(model) as job:
        first = [float(job.step(BATCH)) for _ in range(2)]
    eager = Eager(model)
    assert first == pytest.approx([float(eager.step(BATCH)) for _ in range(2)], abs=1e-6)
    assert first != pytest.approx([float(Eager(lora(llama())).step(BATCH))] * 2, abs=1e-4)


def test_target_names_that_match_nothing_never_reach_the_compiler() -> None:
    with pytest.raises(ValueError, match="Target modules"):
        lora(llama(), target_modules=["query_projection"])


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = lora(llama())
    model.requires_grad_(False)
    with pytest.raises(penstock.errors.PenstockError, match="PeftModel has no parameter that requires a gradient"):
        compile_job(model)


@pytest.mark.slow
def test_adapters_switched_on_after_compile_are_refused_by_name() -> None:
    model = MODELS["one of two"]()
    with compile_job(model) as job:
        job.step(BATCH)
        model.set_adapter("default")
        with pytest.raises(penstock.errors.PlanError, match=r"lora_[AB]\.(default|other)"):
            job.step(BATCH)


@pytest.mark.slow
def test_prompt_tuning_trains_as_in_eager() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(0)
    assert_trains(peft.get_peft_model(llama(), config))
