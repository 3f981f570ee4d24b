"""`functions.linear_float8`: a linear layer whose products are in float8, by one of torchao's recipes for training.

Input, weight and gradient stay in the precision around the layer; before each product both operands are scaled and
cast. The scales, the casts and the products are torchao's own functions, so values and gradients equal those of its
`Float8Linear`. Unlike that, a frozen weight takes no product for its gradient, and nothing of the input is saved for
one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .libraries import float8

RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")
ALIGNED = 16  # the inner dimension of a product in float8 is a multiple of this


def linear_float8(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str, emulate: bool = False
) -> Tensor:
    """`F.linear` by this recipe of torchao.

    emulate: multiply the values that float8 has in fp32, as devices do that have no such products.
    """
    found: Tensor = _LinearFloat8.apply(input, weight, recipe, emulate)
    return found if bias is None else found + bias.to(found.dtype)


class _Casts(NamedTuple):
    """The configurations of a product's two operands, and the roles by which torchao tells them apart."""

    left: Any
    right: Any
    left_role: str
    right_role: str


class _Recipe:
    """The three products of a linear layer by one of torchao's recipes."""

    def __init__(self, name: str):
        self.library = float8()
        self.config = config = self.library.config.Float8LinearConfig.from_recipe_name(name)
        products = ("output", "grad_input", "grad_weight")
        fast = {each: getattr(config, f"gemm_config_{each}").use_fast_accum for each in products}
        scaled = self.library.float8_training_tensor.ScaledMMConfig
        make = self.library.float8_training_tensor.LinearMMConfig
        # By whether the inner dimension has to be filled up with zeros.
        self.gemms = {
            pads: make(*(scaled(False, fast[each], False, pads) for each in products)) for pads in (False, True)
        }
        self.output = _Casts(config.cast_config_input, config.cast_config_weight, "INPUT", "WEIGHT")
        self.grad_input = _Casts(
            config.cast_config_grad_output, config.cast_config_weight_for_grad_input, "GRAD_OUTPUT", "WEIGHT"
        )
        self.grad_weight = _Casts(
            config.cast_config_grad_output_for_grad_weight,
            config.cast_config_input_for_grad_weight,
            "GRAD_OUTPUT",
            "INPUT",
        )

    def product(self, casts: _Casts, left: Tensor, right: Tensor, emulate: bool) -> Tensor:
        """`left @ right`. Where rows are scaled each, these are the rows of the left and the columns of the right."""
        scaling = self.library.config.ScalingType
        if casts.left.scaling_type is scaling.DISABLED:
            return torch.mm(left, right)
        gemms = self.gemms[left.shape[1] % ALIGNED > 0]
        a = self._cast(left, casts.left, casts.left_role, -1, gemms)
        b = self._cast(right, casts.right, casts.right_role, 0, gemms)
        if emulate:
            return torch.mm(a._data.float() / a._scale, b._data.float() / b._scale).to(left.dtype)
        ops, tensors = self.library.float8_ops, self.library.float8_training_tensor
        how = tensors.choose_scaled_mm_config(a._gemm_input_role, gemms, b._gemm_input_role, gemms)
        operands = ops.preprocess_addmm(a, b)
        del a, b
        found: Tensor = ops.addmm_float8_unwrapped(*operands, left.dtype, use_fast_accum=how.use_fast_accum)
        return found

    def _cast(self, x: Tensor, cast: Any, role: str, dim: int, gemms: Any) -> Any:
        """A matrix in float8, with its scales."""
        utils, roles = self.library.float8_scaling_utils, self.library.float8_training_tensor.GemmInputRole
        return utils.hp_tensor_to_float8_dynamic(
            x,
            cast.target_dtype,
            gemms,
            gemm_input_role=getattr(roles, role),
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=utils.get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )


@functools.cache
def _recipe(name: str) -> _Recipe:
    return _Recipe(name)


class _LinearFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, recipe: str, emulate: bool) -> Tensor:
        of_input, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        ctx.recipe, ctx.emulate, ctx.shape = recipe, emulate, input.shape
        by = _recipe(recipe)
        found = by.product(by.output, input.reshape(-1, input.shape[-1]), weight.t(), emulate)
        return found.reshape(*input.shape[:-1], found.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        by, grad = _recipe(ctx.recipe), grads[0].reshape(-1, grads[0].shape[-1])
        of_input = of_weight = None
        if weight is not None:
            of_input = by.product(by.grad_input, grad, weight, ctx.emulate).reshape(ctx.shape)
        if input is not None:
            rows = input.reshape(-1, input.shape[-1])
            of_weight = by.product(by.grad_weight, grad.t(), rows, ctx.emulate)
        return of_input, of_weight, None, None
