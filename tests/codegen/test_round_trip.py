"""A generated file computes what the model computes, bit for bit: loss, gradients and buffers, in both modes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from zoo import without_cache, zoo

from penstock.tests.codegen.generated import Generated, eager, equal, generate, gradients, run
from penstock.tests.shown_elsewhere import slow_but

MODELS = sorted(zoo())
STAGES = {"gpt2": 3, "t5": 4, "bert": 2, "llama": 2, "wide_resnet": 3}


def make(name: str):  # type: ignore[no-untyped-def]
    options = {"experts": "batched_mm"} if name == "mixtral" else {}
    model, batch = zoo()[name](**options)
    return without_cache(model), batch


@functools.cache
def case(name: str, num_stages: int = 1):  # type: ignore[no-untyped-def]
    model, batch = make(name)
    return model, batch, generate(model, batch, num_stages)


def assert_same(model, batch, generated: Generated, folder: Path) -> None:  # type: ignore[no-untyped-def]
    file = generated.load(folder)
    for training in (True, False):
        model.train(training)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outcomes = []
        for is_generated in (False, True):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            model.zero_grad(set_to_none=True)
            torch.manual_seed(5)
            loss = run(generated, file, batch, training)["loss"] if is_generated else eager(model, batch)
            loss.backward()
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            outcomes.append(({"loss": loss.detach()}, gradients(model), buffers))
        for expected, found in zip(*outcomes):
            assert equal(expected, found) == []


@pytest.mark.parametrize("name", slow_but(("gpt2", "custom_function", "in_place", "lstm"), MODELS))
def test_one_stage_equals_eager(name: str, tmp_path: Path) -> None:
    assert_same(*case(name), tmp_path)


@pytest.mark.parametrize("name", slow_but(("gpt2",), STAGES))
def test_several_stages_equal_eager(name: str, tmp_path: Path) -> None:
    model, batch, generated = case(name, STAGES[name])
    assert len(generated.stages) == STAGES[name]
    assert_same(model, batch, generated, tmp_path)


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "t5", "wide_resnet", "llama"]))
def test_state_dict_has_the_names_of_the_interface(name: str, tmp_path: Path) -> None:
    model, _, generated = case(name, STAGES[name])
    file = generated.load(tmp_path)
    known = model.state_dict().keys()
    for stage in generated.stages:
        names = file.build(stage.spec.name).state_dict().keys()
        assert names <= known
        assert {p.name for p in stage.spec.params} <= names


def test_a_frozen_half_stays_frozen(tmp_path: Path) -> None:
    model, batch = make("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[0].ln_1.bias.requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    generated = generate(model, batch)
    assert_same(model, batch, generated, tmp_path)
    text = generated.text
    assert "nn.Embedding(64, 32).requires_grad_(False)" in text
    assert "self.ln_1.bias.requires_grad_(False)" in text
    assert "self.mlp.c_fc.weight = nn.Parameter(torch.empty(32, 128), requires_grad=False)" in text


class OnlyOn(TorchFunctionMode):
    """Every tensor that a torch function returns lies on one device."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == self.device, func
        return result


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "t5", "llama", "bert", "vit", "mixtral", "wide_resnet"]))
def test_nothing_is_tied_to_the_device_of_the_capture(name: str, tmp_path: Path) -> None:
    _, batch, generated = case(name)
    file = generated.load(tmp_path)
    (spec,) = (stage.spec for stage in generated.stages)
    inputs = [batch[i.name].to("meta") for i in spec.inputs]
    with OnlyOn("meta"):
        results = file.build("stage0")(*inputs)
    assert [tuple(r.shape) for r in results] == [o.shape for o in (*spec.outputs, *spec.extra_outputs)]
