"""`functions.linear_float8`: a linear layer whose products are in float8, by one of torchao's recipes for training.

Input, weight and gradient stay in the precision around the layer; before each product both operands are scaled and
cast. Scales, casts and products are torchao's own functions, so values and gradients equal those of its `Float8Linear`.
Unlike that, a frozen weight takes no product for its gradient, and nothing of the input is saved for one. A scale, and
a cast by it, are chains (`chains.py`): on GPUs each is one kernel where that was tried.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantised.libraries import float8
from ..torch_names import will_engine_execute_node
from .chains import CountCall, fuse, is_noting

ALIGNED = 16  # dimensions of operands in float8 are multiples of this


def linear_float8(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str, emulate: bool = False,
    one_call: CountCall | None = None,
) -> Tensor:  # fmt: skip
    """`F.linear` by this recipe of torchao.

    emulate: multiply the values that float8 has in fp32, as for devices without such products. one_call: see `fuse`.
    """
    found: Tensor = _LinearFloat8.apply(input, weight, _Products(recipe, emulate, one_call))
    return found if bias is None else found + bias.to(found.dtype)


class _Casts(NamedTuple):
    """torchao's configurations of a product's left and right operand, and the roles by which it tells them apart."""

    left: Any
    right: Any
    left_role: str
    right_role: str


@functools.cache
def _config(recipe: str) -> Any:
    return float8().config.Float8LinearConfig.from_recipe_name(recipe)


@dataclass(frozen=True)
class _Products:
    """The products of a linear layer: `left @ right`, in which rows of the left and columns of the right have scales of
    their own where the recipe scales by rows."""

    recipe: str
    emulate: bool
    one_call: CountCall | None

    def output(self, input: Tensor, weight: Tensor) -> Tensor:
        config = _config(self.recipe)
        casts = _Casts(config.cast_config_input, config.cast_config_weight, "INPUT", "WEIGHT")
        return self._multiply(casts, input, weight.t(), config.gemm_config_output)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        config = _config(self.recipe)
        right = config.cast_config_weight_for_grad_input
        casts = _Casts(config.cast_config_grad_output, right, "GRAD_OUTPUT", "WEIGHT")
        return self._multiply(casts, grad, weight, config.gemm_config_grad_input)

    def weight_gradient(self, grad: Tensor, input: Tensor) -> Tensor:
        config = _config(self.recipe)
        left, right = config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight
        casts = _Casts(left, right, "GRAD_OUTPUT", "INPUT")
        return self._multiply(casts, grad.t(), input, config.gemm_config_grad_weight)

    def _multiply(self, casts: _Casts, left: Tensor, right: Tensor, gemm: Any) -> Tensor:
        library = float8()
        if casts.left.scaling_type is library.config.ScalingType.DISABLED:
            return torch.mm(left, right)
        tensors, pads = library.float8_training_tensor, left.shape[1] % ALIGNED > 0
        gemms = tensors.LinearMMConfig(*[tensors.ScaledMMConfig(False, gemm.use_fast_accum, False, pads)] * 3)
        a = self._cast(left, casts.left, -1, casts.left_role, gemms)
        b = self._cast(right, casts.right, 0, casts.right_role, gemms)
        if self.emulate:
            return torch.mm(a._data.float() / a._scale, b._data.float() / b._scale).to(left.dtype)
        operands = library.float8_ops.preprocess_addmm(a, b)
        del a, b
        found: Tensor = library.float8_ops.addmm_float8_unwrapped(
            *operands, left.dtype, use_fast_accum=gemm.use_fast_accum
        )
        return found

    def _cast(self, x: Tensor, cast: Any, dim: int, role: str, gemms: Any) -> Any:
        """A matrix in float8 with its scales, as torchao holds them."""
        library, dtype, by = float8(), cast.target_dtype, cast.scaling_granularity
        axis = library.float8_scaling_utils.get_maybe_axiswise_dim(dim, by)
        powers = _config(self.recipe).round_scales_to_power_of_2

        def scale_of(x: Tensor) -> Tensor:
            found: Tensor = library.float8_utils.tensor_to_scale(x, dtype, False, None, by, axis, powers)
            return found

        def cast_by(x: Tensor, scale: Tensor) -> Tensor:
            found: Tensor = library.float8_utils.to_fp8_saturated(x.to(torch.float32) * scale, dtype)
            return found

        x = x.detach()
        scale = fuse(scale_of, [x], (), self.one_call, (dtype, axis, powers))
        bits = fuse(cast_by, [x, scale], (), self.one_call, (dtype,))
        tensors = library.float8_training_tensor
        return tensors.Float8TrainingTensor(bits, scale, x.dtype, gemms, tensors.GemmInputRole[role], axis)


class _LinearFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, products: _Products) -> Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.products, ctx.shape = products, input.shape
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        found = products.output(_rows(input), weight)
        if is_noting():  # the chains of backward have no other run that could be noted
            _gradients(products, torch.empty_like(found), input, weight)
        return found.reshape(*input.shape[:-1], found.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = (x if _is_asked_for(ctx, place) else None for x, place in zip(ctx.saved_tensors, (1, 0)))
        of_input, of_weight = _gradients(ctx.products, _rows(grads[0]), *saved)
        return None if of_input is None else of_input.reshape(ctx.shape), of_weight, None


def _is_asked_for(ctx: Any, place: int) -> bool:
    """Whether the backward under way wants the gradient of the operand at this place: half of a backward wants one."""
    node = ctx.next_functions[place][0]
    try:
        return node is not None and bool(will_engine_execute_node(node))
    except RuntimeError:  # a leaf for which this backward was called
        return True


def _gradients(
    products: _Products, grad: Tensor, input: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight that the other one was saved for."""
    of_input = None if weight is None else products.input_gradient(grad, weight)
    return of_input, None if input is None else products.weight_gradient(grad, _rows(input))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
