"""Weights of a base model reach it under any wrapper: PEFT's adapters, compiled models, a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, PlanError
from penstock.runtime.model_names import named_tensors
from penstock.runtime.state.weights import open_directory
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.runtime.state.test_pretrained import bert, gpt2, llama, mixtral, on_meta
from penstock.tests.runtime.state.test_wrapped import IDS, Called, Headed, lora


class Pair(nn.Module):
    """Two parts of the user's own; files of one of them are known by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.second = nn.Linear(4, 2)


def save(model: Any, directory: Path) -> dict[str, Tensor]:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
    else:
        penstock.runtime.state.pretrained.save_pretrained(directory, [], model)
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


@pytest.mark.parametrize("make", [gpt2, llama, mixtral])
@pytest.mark.parametrize("wrap", [Called, torch.compile, lambda m: nn.Sequential(nn.ModuleDict({"m": m}))])
def test_the_files_of_the_model_in_a_wrapper_are_read(make: Any, wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = save(model := make(), tmp_path)
    inner = on_meta(make)
    wrapper = wrap(inner)
    source = open_directory(tmp_path, wrapper)  # nothing is missing
    front = next(name for name, module in wrapper.named_modules() if module is inner)
    for name, value in values.items():
        assert torch.equal(source.read(f"{front}.{name}"), value), name
    assert source.unexpected_keys == () and type(model) is type(inner)


def test_a_head_of_the_wrapper_keeps_its_own_values_or_is_initialised(tmp_path: Path) -> None:
    values = save(bert("MaskedLM").bert, tmp_path)
    wrapper = Headed(on_meta(lambda: bert("MaskedLM").bert))
    with pytest.raises(CheckpointError, match=r"Missing \(2\): score\.weight, score\.bias"):
        open_directory(tmp_path, wrapper)
    source = open_directory(tmp_path, wrapper, missing_ok=True)
    assert torch.equal(source.read("score.weight"), wrapper.score.weight)  # it is in memory already
    key = "embeddings.word_embeddings.weight"
    assert torch.equal(source.read(f"encoder.{key}"), values[key])
    wrapper.score = nn.Linear(16, 3, device="meta")
    drawn = [open_directory(tmp_path, wrapper, missing_ok=True, seed=seed).read("score.weight") for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_part_is_known_by_its_names_if_only_one_has_them(tmp_path: Path) -> None:
    values = save(Pair().first, tmp_path / "first")
    with torch.device("meta"):
        model = Pair()
    model.second = nn.Linear(4, 2)
    source = open_directory(tmp_path / "first", model, missing_ok=["second.*"])
    assert torch.equal(source.read("first.2.bias"), values["2.bias"])
    save(nn.Linear(4, 4), tmp_path / "one")  # which of three?
    with pytest.raises(CheckpointError, match="Not one name agrees"):
        open_directory(tmp_path / "one", model, missing_ok=True)


# --- PEFT


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_the_base_of_adapters_comes_from_the_files_and_adapters_begin_as_peft_begins(
    options: dict[str, Any], tmp_path: Path
) -> None:
    values = save(llama(), tmp_path)
    options = {"init_lora_weights": True, **options}
    model = lora(on_meta(llama), **options)
    live = lora(llama(), **options)
    source = open_directory(tmp_path, model, missing_ok=True)
    assert source.unexpected_keys == ()
    fresh = [name for name in named_tensors(model) if ".lora_" in name]
    assert set(source.fresh_names) == set(fresh)
    for name, tensor in named_tensors(model).items():
        value, own = source.read(name), named_tensors(live)[name]
        assert value.shape == tensor.shape and not value.is_meta
        if "lora_B" in name:
            assert not value.any()  # so that the adapters change nothing before training
        elif "lora_A" in name:
            bound = 1 / own.shape[1] ** 0.5  # of kaiming_uniform_ with a = sqrt(5)
            assert bound / 2 < value.abs().max() <= bound
    key = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(source.read(key), values["model.layers.0.self_attn.q_proj.weight"])
    if "modules_to_save" in options:
        for part in ("original_module", "modules_to_save.default"):
            assert torch.equal(source.read(f"base_model.model.lm_head.{part}.weight"), values["lm_head.weight"])


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_adapters_that_begin_from_the_weights_are_refused_on_meta(options: dict[str, Any], tmp_path: Path) -> None:
    save(llama(), tmp_path)
    model = lora(on_meta(llama), init_lora_weights=True)
    for config in model.peft_config.values():
        config.init_lora_weights = options.get("init_lora_weights", True)
    if "use_dora" in options:
        model = lora(on_meta(llama), **options)
    with pytest.raises(PlanError, match="lora_"):
        open_directory(tmp_path, model, missing_ok=True)


@pytest.mark.slow
def test_adapters_on_a_base_on_meta_train_as_those_on_a_live_one(tmp_path: Path) -> None:
    class Loss(Called):
        def __init__(self, model: Any):
            nn.Module.__init__(self)
            self.model = model

    def losses(model: nn.Module, **more: Any) -> list[float]:
        job = penstock.compile(
            model, penstock.Hardware.cpu(num_devices=1), example_inputs={"input_ids": IDS}, optimizer=SGD,
            micro_batches=2, strategy="balanced", **more,
        )  # fmt: skip
        with job:
            found = [float(job.step({"input_ids": IDS})) for _ in range(3)]
            job.sync()
        return found

    base = llama()
    base.save_pretrained(tmp_path)
    meta, live = Loss(lora(on_meta(llama), init_lora_weights=True)), Loss(lora(base, init_lora_weights=True))
    drawn = open_directory(tmp_path, meta, missing_ok=True)
    with torch.no_grad():
        for name, tensor in named_tensors(live).items():
            tensor.copy_(drawn.read(name))
    with pytest.warns(UserWarning, match="absent and start from their initialiser"):
        found = losses(meta, weights=tmp_path)
    assert found == losses(live) and found[2] != found[0]
    for name, tensor in named_tensors(live).items():
        assert torch.equal(named_tensors(meta)[name], tensor), name
