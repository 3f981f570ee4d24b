"""Records of operators that work element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .record import Elements, RowCall, nonlinear, nothing, plain, record
from .states import ONE, ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale, differs, whole

LIMITS = ("clamp", "clamp_min", "clamp_max")  # which keep a count from being zero
Operand = tuple[RowState, Sequence[int]]  # a value's state and shape


def operands(call: RowCall, *names: str) -> list[Operand]:
    """States and shapes of the tensors among these arguments; without names, of all."""
    values = [call[name] for name in names] if names else list(call.tensors())
    return [(call.tensor_state(value), value.shape) for value in values if isinstance(value, torch.Tensor)]


def combine(call: RowCall, parts: Sequence[Operand], shape: Sequence[int]) -> RowState:
    """The state of a value whose element depends on one element of each operand, broadcast to `shape`, in some way that
    is not linear."""
    states = [state for state, _ in parts]
    if any(isinstance(state, ByRow) for state in states) and any(isinstance(state, OverRows) for state in states):
        return call.mix(Kind.REUSED)
    found = nonlinear(call, *states) or plain(together(call, parts, shape))
    if isinstance(found, Free) and any(state.scale != ONE for state in states):
        same = call.name in LIMITS and len(states) == 1
        return replace(found, scale=states[0].scale if same else Scale(unsure=True))
    return found


def together(call: RowCall, parts: Sequence[Operand], shape: Sequence[int]) -> RowState:
    """The state of a value whose element depends on one element of each operand; none is a total or mixed. The scale is
    left open."""
    found = [_broadcast(call, state, own, shape) for state, own in parts if isinstance(state, ByRow)]
    frees = [_broadcast_free(state, own, shape) for state, own in parts if isinstance(state, Free)]
    if not found:
        return Free(varies=frozenset().union(*(free.varies for free in frees)))
    rows = [row for row in found if isinstance(row, ByRow)]
    if len(rows) < len(found):
        return Mixed()
    first = rows[0]
    if any((row.dim, row.inner, row.order) != (first.dim, first.inner, first.order) for row in rows):
        return call.mix(Kind.PAIRS)
    steps = {free.counts[1] for free in frees if free.counts and free.counts[0] == first.dim}
    if steps and call.name in ("add", "sub") and not call.results()[0].is_floating_point():
        return replace(first, step=steps.pop())
    if call.rows == 1 and any(free.counts and free.counts[0] == first.dim for free in frees):
        return call.unclear()
    if any(differs(free, first.dim, first.inner, call.rows) for free in frees):
        call.watcher.note(Kind.ROW_NUMBER)
    return replace(first, step=max(row.step for row in rows))


def _broadcast(call: RowCall, state: ByRow, own: Sequence[int], shape: Sequence[int]) -> ByRow | Mixed:
    dim = state.dim + len(shape) - len(own)
    return replace(state, dim=dim) if own[state.dim] == shape[dim] else call.unclear()


def _broadcast_free(state: Free, own: Sequence[int], shape: Sequence[int]) -> Free:
    before = len(shape) - len(own)
    counts = state.counts and (state.counts[0] + before, state.counts[1])
    return replace(
        state, varies=frozenset((d + before, low, high) for d, low, high in state.varies if own[d] != 1), counts=counts
    )


def elementwise(call: RowCall) -> RowState:
    """Any operator that torch marks as pointwise and that has no rule of its own."""
    return combine(call, operands(call), call.results()[0].shape)


def channelwise(call: RowCall) -> RowState:
    """Element by element, with numbers for each place along one dimension."""
    value, axis = call["self"], call["axis"]
    shape = [size if dim == axis else 1 for dim, size in enumerate(value.shape)]
    numbers = [call.state(name) for name in ("scale", "zero_point")]
    if not all(isinstance(state, Free) for state in numbers):
        return nonlinear(call, *numbers) or call.mix(Kind.PAIRS)
    return combine(call, [*operands(call, "self"), (Free(varies=whole({axis})), shape)], value.shape)


def membership(call: RowCall) -> RowState:
    """Each element's place among those of another value, or whether it is one of them."""
    names = ("elements", "test_elements") if call.name == "isin" else ("self", "boundaries")
    if not isinstance(call.state(names[1]), Free):
        return call.mix(Kind.PAIRS)
    return combine(call, operands(call, names[0]), call.results()[0].shape)


def complex_parts(call: RowCall) -> RowState:
    """A complex number as two along a last dimension, or the reverse."""
    state = call.state("self")
    if isinstance(state, ByRow) and state.dim == call.results()[0].dim():
        return call.mix(Kind.ACROSS)
    return state if isinstance(state, ByRow | OverRows | Mixed) else Free(varies=whole(range(call["self"].dim() + 1)))


def same(call: RowCall) -> RowState:
    """Linear in its only operand, and of its shape."""
    state = next(call.tensor_state(tensor) for tensor in call.tensors())
    if isinstance(state, ByRow | Free) and call.name == "neg":
        return replace(state, **({"step": 0} if isinstance(state, ByRow) else {"counts": None}))
    return state


def copy(call: RowCall) -> RowState:
    source = call["src"]
    return spread(call, call.tensor_state(source), source.shape, call["self"].shape)


def spread(call: RowCall, state: RowState, own: Sequence[int], shape: Sequence[int]) -> RowState:
    """The state of a value broadcast to a shape."""
    if isinstance(state, ByRow):
        return _broadcast(call, state, own, shape)
    return _broadcast_free(state, own, shape) if isinstance(state, Free) else state


def add(call: RowCall) -> RowState:
    """A sum: of totals with the same scale a total, else row by row."""
    parts = operands(call)
    states = [state for state, _ in parts]
    factor = call["alpha"] if call.given.get("alpha") is not None else 1
    if call.name == "lerp" and isinstance(call["weight"], torch.Tensor):
        return combine(call, parts, call.results()[0].shape)
    if not any(isinstance(state, OverRows | Mixed | Permutation) for state in states):
        found = combine(call, parts, call.results()[0].shape)
        if isinstance(found, ByRow | Free):
            scales = [state.scale for state in states if not (isinstance(state, Free) and state.is_zero)] or [ONE]
            return replace(_sum_of(call, found, parts), scale=same_scale(call, scales, factor))
        return found
    if any(isinstance(state, Mixed | Permutation) for state in states):
        return nonlinear(call, *states) or Mixed()
    if any(isinstance(state, ByRow) for state in states):
        return call.mix(Kind.REUSED)
    numbers = [call[name] for name in ("self", "other") if isinstance(call.given.get(name), int | float)]
    scales = [state.scale for state in states if not (isinstance(state, Free) and state.is_zero)]
    scales += [ONE for number in numbers if number != 0]
    if len({scale.power for scale in scales}) > 1:
        return call.mix(Kind.UNEVEN)
    return OverRows(scale=same_scale(call, scales, factor))


def _sum_of(call: RowCall, found: RowState, parts: Sequence[Operand]) -> RowState:
    """Row numbers stay so if a constant is added to them; zeros stay zeros if zeros are."""
    if not isinstance(found, Free):
        return found
    frees = [state for state, _ in parts if isinstance(state, Free)]
    if all(free.is_zero for free in frees) and len(frees) == 2:
        return replace(found, is_zero=True)
    return found


def same_scale(call: RowCall, scales: Sequence[Scale], factor: float) -> Scale:
    """The scale of a sum. It differs between values where the model divides by the number of rows in one of them."""
    unsure = any(scale.unsure for scale in scales)
    if not unsure and len({scale.power for scale in scales}) > 1:
        call.watcher.note(Kind.UNEVEN)
    first = Scale(scales[0].power, unsure)
    return first if factor == 1 else first.times(call.watcher.scale(factor))


def multiply(call: RowCall) -> RowState:
    """A product: of a total and a constant a total, of two totals a mix."""
    parts = operands(call)
    states = [state for state, _ in parts]
    over = call.name in ("div", "floor_divide")
    rounds = call.given.get("rounding_mode") is not None or call.name == "floor_divide"
    scale = _product_scale(call, over)
    if any(isinstance(state, Mixed) for state in states):
        return Mixed()
    if isinstance(states[0], Permutation):
        number = call["other"]
        is_share = rounds and isinstance(number, int) and len(states) == 1
        return replace(states[0], share=states[0].share * number) if is_share else call.mix(Kind.ACROSS)
    if not any(isinstance(state, OverRows) for state in states):
        found = combine(call, parts, call.results()[0].shape)
        if isinstance(found, Free):
            return _constant_product(call, replace(found, scale=scale), states)
        return replace(found, scale=scale) if isinstance(found, ByRow) and not rounds else found
    if rounds or (over and len(states) == 2 and isinstance(states[0], Free)):
        return call.mix(Kind.NONLINEAR)
    if sum(isinstance(state, OverRows) for state in states) == 2:
        return call.mix(Kind.RATIO if over else Kind.NONLINEAR)
    if any(isinstance(state, ByRow | Permutation) for state in states):
        return call.mix(Kind.REUSED)
    return OverRows(scale=scale)


def _product_scale(call: RowCall, over: bool) -> Scale:
    scales = []
    for name in ("self", "other"):
        value = call.given.get(name)
        scales.append(call.watcher.scale(value) if isinstance(value, int | float) else call.state(name).scale)
    return scales[0].divide_by(scales[1]) if over else scales[0].times(scales[1])


def _constant_product(call: RowCall, found: Free, states: Sequence[RowState]) -> Free:
    """A product of constants: zeros stay zeros, row numbers times a number are further apart."""
    is_zero = any(isinstance(state, Free) and state.is_zero for state in states) and call.name == "mul"
    first, number = states[0], call.given.get("other")
    if len(states) == 1 and isinstance(first, Free) and first.counts and isinstance(number, int):
        return replace(found, is_zero=is_zero, counts=(first.counts[0], first.counts[1] * number))
    return replace(found, is_zero=is_zero)


def choose(call: RowCall) -> RowState:
    """Linear in its two values where the condition is a constant."""
    parts = operands(call)
    values, condition = operands(call, "self", "other"), call.state("condition")
    if isinstance(condition, Free) and any(isinstance(state, OverRows) for state, _ in values):
        return _linear_choice(call, [state for state, _ in values])
    found = combine(call, parts, call.results()[0].shape)
    if isinstance(found, ByRow):
        kept = [s.scale for s, _ in values if not (isinstance(s, Free) and s.is_zero)] or [ONE]
        return replace(found, scale=same_scale(call, kept, 1))
    return found


def _linear_choice(call: RowCall, states: Sequence[RowState]) -> RowState:
    if any(isinstance(state, ByRow | Mixed | Permutation) for state in states):
        return call.mix(Kind.REUSED)
    scales = [state.scale for state in states if not (isinstance(state, Free) and state.is_zero)]
    return OverRows(scale=scales[0]) if len({s.power for s in scales}) == 1 else call.mix(Kind.UNEVEN)


def masked_fill(call: RowCall) -> RowState:
    state, mask = call.state("self"), call.state("mask")
    if isinstance(state, OverRows) and isinstance(mask, Free) and call["value"] == 0:
        return state
    value, chosen = operands(call, "self", "mask")
    return fill_state(call, value, chosen, operands(call, "value"))


def fill_state(call: RowCall, value: Operand, mask: Operand, number: Sequence[Operand]) -> RowState:
    """The state of a value with one number in the places where a mask of its shape holds."""
    found = combine(call, [value, mask, *number], call.results()[0].shape)
    return replace(found, scale=value[0].scale) if isinstance(found, ByRow) else found


record("native_dropout", "glu", rows=elementwise, workspace=nothing)
record("bucketize", rows=membership, workspace=nothing)
record(
    "bernoulli", "poisson", "binomial", "_standard_gamma", "rrelu_with_noise", "rrelu_with_noise_functional",
    "_fake_quantize_learnable_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "complex", "polar", "frexp", "_fused_dropout",
    "log_sigmoid_forward", "hardswish", "_prelu_kernel", rows=elementwise,
)  # fmt: skip
record(
    "fake_quantize_per_channel_affine_cachemask", "_fake_quantize_learnable_per_channel_affine", rows=channelwise,
)  # fmt: skip
record("isin", rows=membership)
record("view_as_real", "view_as_complex", rows=complex_parts)
record("clone", "_to_copy", rows=same, elements=Elements.SAME, workspace=nothing)
record("detach", "alias", rows=same, elements=Elements.SAME)
record("neg", "_conj", "_neg_view", rows=same)
record("copy", rows=copy, workspace=nothing)
record("add", "sub", "rsub", "lerp", rows=add)
record("mul", "div", rows=multiply)
record("floor_divide", rows=multiply, workspace=nothing)
record("where", rows=choose)
record("masked_fill", rows=masked_fill)
record("leaky_relu_backward", "penstock::unpack", workspace=nothing)
