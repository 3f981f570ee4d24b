"""Printed files pass: random models, both tracers. The files of all other models pass in tests/codegen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.runtime.source import allowed
from penstock.runtime.source.file import run_verified
from penstock.runtime.source.trust import ONLY_VERIFIED
from penstock.tests.codegen import generated
from penstock.tests.random_models import random_model
from penstock.tests.zoo import zoo


@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))])
def test_files_of_random_models_pass(number: int) -> None:
    model, batches, _ = random_model(number)
    text = generated.generate(model, batches[0], 2).text
    assert "Stage1" in run_verified(Path("device0.py"), text, ONLY_VERIFIED)


@pytest.mark.parametrize(
    "function",
    [torch.tanh, torch.relu_, torch.einsum, torch.rand_like, torch.nn.functional.max_pool2d, torch._grouped_mm]
    + [
        torch.linalg.vector_norm,
        torch.fft.rfft,
        torch.special.expit,
        torch.ops.aten.linear,
        torch.ops.aten.bernoulli.p,
    ],
)
def test_what_computes_may_be_called(function: object) -> None:
    assert allowed.is_function(function)


@pytest.mark.parametrize(
    "function",
    [torch.load, torch.save, torch.from_file, torch.compile, torch.vmap, torch.manual_seed, torch.set_num_threads]
    + [torch.nn.functional.handle_torch_function, torch.ops.aten.from_file, torch.ops.aten.save, torch.ops.aten.set_]
    + [torch.ops.aten._sparse_coo_tensor_unsafe.default, torch.ops.aten.resize_, open, print, getattr],
)
def test_what_does_more_may_not(function: object) -> None:
    assert not allowed.is_function(function)


def test_methods_that_reach_beyond_a_tensor_are_left_out() -> None:
    assert {"view", "add_", "masked_fill", "new_zeros", "to", "__rpow__"} <= allowed.methods()
    beyond = {"apply_", "map_", "register_hook", "numpy", "data_ptr", "untyped_storage", "set_", "backward", "resize_"}
    assert not beyond & allowed.methods()
    assert not any(name.startswith("_") and not name.endswith("__") for name in allowed.methods())


def test_a_member_hides_nothing_of_a_module() -> None:
    assert all(allowed.is_member(name) for name in ("attn", "norm", "_proj", "weight"))
    assert not any(allowed.is_member(name) for name in ("forward", "__class__", "_modules", "apply", "register_hook"))


def test_only_torch_s_layers_are_built() -> None:
    assert allowed.is_layer(nn.Linear) and allowed.is_layer(nn.LSTM)
    assert not any(allowed.is_layer(kind) for kind in (nn.DataParallel, nn.Parameter, type(zoo()["mlp"]()[0]), str))
