"""`linear_float8` computes what torchao's own layer does, with products of the device and emulated ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from penstock.ir.precision import PRECISIONS, Precision
from penstock.runtime.compiled.chain_kernels import make_kernels
from penstock.runtime.functions import linear_float8
from penstock.runtime.functions.chains import KERNELS, Chain
from penstock.runtime.functions.linear_float8 import _Products
from penstock.runtime.torch_names import FakeTensorMode
from penstock.tests.shown_elsewhere import slow_but

RECIPES = [row.float8 for row in PRECISIONS.values() if row.float8]
IN, OUT, ROWS = 32, 48, 16


def operands(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, nn.Linear, Tensor]:
    """Inputs of two rows of the batch, a layer, and a gradient of its results."""
    torch.manual_seed(seed)
    x = torch.randn(2, rows, IN).bfloat16().requires_grad_()
    return x, nn.Linear(IN, OUT).bfloat16(), torch.randn(2, rows, OUT).bfloat16()


def results(made: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [made, *torch.autograd.grad(made, leaves, grad)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [ROWS, 7])
def test_values_and_gradients_are_those_of_torchao(recipe: str, rows: int) -> None:
    x, layer, grad = operands(rows)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs: Any = convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)
    wanted = results(theirs(x), [x, *theirs.parameters()], grad)
    made = linear_float8(x, layer.weight, layer.bias, recipe=recipe, emulate=True)
    assert all(map(torch.equal, results(made, [x, *layer.parameters()], grad), wanted))
    assert not torch.equal(made, layer(x))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [ROWS, 7])
def test_products_of_the_device_are_those_emulated(recipe: str, rows: int) -> None:
    """Also where the tokens, over which the gradient of the weight is summed, are filled up with zeros."""
    x, layer, grad = operands(rows)
    leaves = [x, layer.weight]
    found, wanted = (
        results(linear_float8(*leaves, recipe=recipe, emulate=emulate), leaves, grad) for emulate in (False, True)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_weight_takes_no_product_and_saves_no_input(recipe: str) -> None:
    x, layer, grad = operands()
    wanted = results(linear_float8(x, layer.weight, recipe=recipe, emulate=True), [x], grad)
    layer.requires_grad_(False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made = linear_float8(x, layer.weight, recipe=recipe, emulate=True)
    assert [t.shape for t in saved] == [layer.weight.shape]
    assert all(map(torch.equal, results(made, [x], grad), wanted))


def test_half_of_a_backward_takes_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of inputs none for the weight, and the other way round."""
    x, layer, grad = operands()
    made = linear_float8(x * 1, layer.weight * 1, recipe="rowwise", emulate=True)
    wanted = torch.autograd.grad(made, [x, layer.weight], grad, retain_graph=True)
    for leaf, gradient, name in zip((x, layer.weight), wanted, ("weight_gradient", "input_gradient")):
        with monkeypatch.context() as patch:
            patch.setattr(_Products, name, None)
            (found,) = torch.autograd.grad(made, [leaf], grad, retain_graph=True)
        assert torch.equal(found, gradient)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_by_rows_do_not_see_other_rows(recipe: str) -> None:
    """Values and their gradients are the same in any micro-batch; those of the weight are rounded by other scales."""
    x, layer, grad = operands()
    whole = results(linear_float8(x, layer.weight, recipe=recipe, emulate=True), [x], grad)
    large = torch.cat([x[:1], 1000 * x[1:]])
    parts = results(linear_float8(large, layer.weight, recipe=recipe, emulate=True), [x], grad)
    assert torch.equal(whole[0][:1], parts[0][:1]) and torch.equal(whole[1][:1], parts[1][:1])


@pytest.fixture
def no_kernels() -> Iterator[None]:
    KERNELS.clear()
    yield
    KERNELS.clear()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", slow_but(RECIPES[:1], RECIPES))
def test_scales_and_casts_run_as_kernels(
    recipe: str, backend: str, no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, those of backward as well, and with the same bits."""
    x, layer, grad = operands()
    leaves = [x, layer.weight]

    def run_on_fakes() -> None:
        with FakeTensorMode():
            fakes = [torch.empty(leaf.shape, dtype=leaf.dtype, requires_grad=True) for leaf in leaves]
            linear_float8(*fakes, recipe=recipe, emulate=True)

    wanted = results(linear_float8(*leaves, recipe=recipe, emulate=True), leaves, grad)
    assert make_kernels(run_on_fakes, torch.device("cpu"), Precision.of("fp8"), backend) == {}
    monkeypatch.setattr(Chain, "run", None)  # nothing runs as written any more
    found = results(linear_float8(*leaves, recipe=recipe, emulate=True), leaves, grad)
    assert all(map(torch.equal, found, wanted))
