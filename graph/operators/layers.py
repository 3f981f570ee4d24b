"""Records of normalisations, pooling, losses and what makes new values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...runtime.torch_names import disable_current_modes
from .kernels import no_kernel
from .pointwise import combine, operands, spread
from .record import Elements, RowCall, constants, nonlinear, nothing, plain, record
from .reductions import total_of
from .states import ONE, ByRow, Free, Kind, Mixed, OverRows, RowState, Scale, differs, whole
from .workspace import layers as workspace_layers


def batch_norm(call: RowCall) -> RowState:
    """In training mode the statistics are those of all rows, channel by channel."""
    state = call.state("input")
    training = call.given.get("training", call.name.startswith("_batch_norm_with"))
    has_rows = isinstance(state, ByRow) and state.dim != 1
    if training and has_rows:
        call.watcher.note(Kind.BATCH_NORM)
    return nonlinear(call, state) or plain(state)


def layer_norm(call: RowCall) -> RowState:
    value, state = call["input"], call.state("input")
    if isinstance(state, ByRow) and state.dim >= value.dim() - len(call["normalized_shape"]):
        return call.mix(Kind.ACROSS)
    mixed = nonlinear(call, state)
    last = whole(range(value.dim() - len(call["normalized_shape"]), value.dim()))
    return mixed or (Free(varies=state.varies | last) if isinstance(state, Free) else plain(state))


def group_norm(call: RowCall) -> RowState:
    return first_dims(call, "input", 1)


def first_dims(call: RowCall, name: str, count: int) -> RowState:
    """Each element depends on elements with the same place in the first `count` dimensions."""
    value, state = call[name], call.state(name)
    if isinstance(state, ByRow) and state.dim >= count:
        return call.mix(Kind.ACROSS)
    return nonlinear(call, state) or (
        Free(varies=whole(range(value.dim()))) if isinstance(state, Free) else plain(state)
    )


def pool(call: RowCall) -> RowState:
    """Rows and channels stay apart; images without a batch have three dimensions and no rows in them."""
    value, state = call["self"], call.state("self")
    spatial = 3 if "3d" in call.name else 1 if "1d" in call.name else 2
    channels_too = call.name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col", "col2im")
    first = max(1 if channels_too else 0, value.dim() - spatial - channels_too)
    linear = "max" not in call.name
    return state if isinstance(state, OverRows) and linear else first_dims(call, "self", max(1, first))


def first_dim(call: RowCall) -> RowState | list[RowState]:
    """Each element depends on elements with the same place in the first dimension of all operands."""
    states = [(call.tensor_state(tensor), tensor.shape) for tensor in call.tensors()]
    mixed = nonlinear(call, *(state for state, _ in states))
    if mixed is not None:
        return mixed
    rows = {plain(state): (state.dim, shape[0]) for state, shape in states if isinstance(state, ByRow)}
    if len(rows) == 1 and [*rows.values()] == [(0, call.results()[0].shape[0])]:
        return next(iter(rows))
    return call.mix(Kind.ACROSS) if rows else constants(call)


def grid_sample(call: RowCall) -> RowState | list[RowState]:
    """Each place of the grid takes elements of the input on its own."""
    state = call.state("grid")
    if isinstance(state, ByRow) and 0 < state.dim < call["grid"].dim() - 1 and isinstance(call.state("input"), Free):
        return plain(replace(state, dim=state.dim + 1))  # after the channels of the input
    return first_dim(call)


def elementwise_loss(call: RowCall) -> RowState:
    parts = operands(call)
    reduction = call.given.get("reduction", 1)
    if reduction == 0:
        return combine(call, parts, call.results()[0].shape)
    whole = torch.broadcast_shapes(*(shape for _, shape in parts))
    return total_of(call, [combine(call, parts, whole), *(state for state, _ in parts)], reduction)


def class_loss(call: RowCall) -> list[RowState]:
    """The loss; of the results that only backward reads nothing is said."""
    return [_loss_of_classes(call), *[Mixed()] * (len(call.results()) - 1)]


def _loss_of_classes(call: RowCall) -> RowState:
    """A loss per row, with classes along dimension 1; with one dimension, of a single row, along dimension 0."""
    value, state, target = call["self"], call.state("self"), call.state("target")
    mixed = nonlinear(call, state, target)
    if mixed is not None:
        return mixed
    rows = [s for s in (state, target) if isinstance(s, ByRow)]
    if isinstance(state, ByRow) and state.dim == (1 if value.dim() > 1 else 0):
        return call.mix(Kind.ACROSS)
    dims = {_loss_dim(s, s is state and value.dim() > 1) for s in rows}
    if len(dims) > 1:
        return call.mix(Kind.PAIRS)
    if rows and isinstance(target, Free) and differs(target, 0, rows[0].inner, call.rows):
        call.watcher.note(Kind.ROW_NUMBER)
    if call["reduction"] != 0:
        weights = [call.state("weight")] if "weight" in call.given else []  # margins of several labels have none
        return total_of(call, [state, target, *weights], call["reduction"])
    return ByRow(dim=next(iter(dims))[0], inner=rows[0].inner, order=rows[0].order) if rows else Free()


def _loss_dim(state: ByRow, has_classes: bool) -> tuple[int, int, int | None]:
    dim = state.dim - (has_classes and state.dim > 1)
    return dim, state.inner, state.order


def aligned_loss(call: RowCall) -> RowState:
    """One loss a row. Targets are row by row, or one after another with their lengths beside them."""
    state = call.state("log_probs")
    if isinstance(state, ByRow) and state.dim == 1:
        return ByRow(dim=0, inner=state.inner)
    return nonlinear(call, state) or (Free() if isinstance(state, Free) else call.mix(Kind.ACROSS))


def distances(call: RowCall) -> RowState:
    """Each element of one side meets each of the other."""
    states = [call.state("x1"), call.state("x2")]
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    out, parts = call.results()[0].dim(), [call["x1"], call["x2"]]
    places: set[tuple[int, int]] = set()
    for i, (state, value) in enumerate(zip(states, parts)):
        if isinstance(state, ByRow):
            if state.dim == value.dim() - 1:
                return call.mix(Kind.ACROSS)
            last = state.dim == value.dim() - 2
            places.add((out - 2 + i if last else state.dim + out - value.dim(), state.inner))
    if not places:
        return Free(varies=whole(range(out)))
    if len(places) > 1:
        return call.mix(Kind.PAIRS)
    dim, inner = next(iter(places))
    return ByRow(dim=dim, inner=inner)


def own_distances(call: RowCall) -> RowState:
    state = call.state("self")
    return nonlinear(call, state) or (Free(varies=whole({0})) if isinstance(state, Free) else call.mix(Kind.PAIRS))


def create(call: RowCall) -> RowState:
    """The same value everywhere, or drawn anew for each element."""
    zeros = call.name in ("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty")
    number = call.given.get("fill_value", call.given.get("value", call.given.get("s")))
    if isinstance(number, torch.Tensor):
        return spread(call, call.tensor_state(number), number.shape, call.results()[0].shape)
    if number is None or isinstance(number, bool):
        return Free(is_zero=zeros)
    return Free(is_zero=number == 0, scale=call.watcher.scale(number))


def lift(call: RowCall) -> RowState:
    """A new value of plain numbers, each in its place."""
    value = call.tensor("self")
    with disable_current_modes():
        numbers = (torch.view_as_real(value) if value.is_complex() else value).flatten().tolist()
    return Free(_scale_of(call, numbers), whole(range(value.dim())), is_zero=not any(numbers))


def arange(call: RowCall) -> RowState:
    out = call.results()[0]
    step = call.given.get("step") or 1
    is_stepped = call.name in ("arange", "range")  # to an end, which no value depends on
    is_counting = call.name == "arange" and not call.given.get("start") and not out.is_floating_point()
    names = ("start", "step") if is_stepped else ("start", "end", "steps", "base", "window_length")
    numbers = [number for name in names if isinstance(number := call.given.get(name), int | float)]
    counts = (0, int(step)) if is_counting else None
    return Free(_scale_of(call, numbers), whole(range(out.dim())), counts)


def _scale_of(call: RowCall, numbers: Sequence[float]) -> Scale:
    """The scale of a value that is made of these numbers."""
    scales = {call.watcher.scale(number) for number in numbers} or {ONE}
    return scales.pop() if len(scales) == 1 else Scale(unsure=True)


def recurrent(call: RowCall) -> list[RowState]:
    """A layer of a recurrent network on (sequence, rows, features): rows are along the last dimension but one."""
    states = [(call.tensor_state(tensor), tensor) for tensor in call.tensors()]
    mixed = nonlinear(call, *(state for state, _ in states))
    if mixed is not None:
        return [mixed] * len(call.results())
    rows = {(s.dim - t.dim(), s.inner) for s, t in states if isinstance(s, ByRow)}
    if rows and (len(rows) > 1 or next(iter(rows))[0] != -2):
        return [call.mix(Kind.ACROSS)] * len(call.results())
    return [_recurrent_result(out, rows) for out in call.results()]


def _recurrent_result(out: torch.Tensor, rows: set[tuple[int, int]]) -> RowState:
    if not rows or out.dim() < 2:
        return Free(varies=whole(range(out.dim())))
    return ByRow(dim=out.dim() - 2, inner=next(iter(rows))[1])


record(
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
    "_batch_norm_with_update_functional", "_batch_norm_no_update", rows=batch_norm,
)  # fmt: skip
record("native_layer_norm", rows=layer_norm, workspace=nothing)
record("_fused_rms_norm", "native_dropout_backward", "nll_loss_backward", workspace=nothing)
record("native_group_norm", rows=group_norm, workspace=workspace_layers.group_norm)
record(
    "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
    rows=pool, workspace=workspace_layers.grid,
)  # fmt: skip
record(
    "avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "mkldnn_max_pool2d", "upsample_nearest1d", "upsample_nearest3d", "upsample_linear1d", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "im2col", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "pixel_shuffle", "pixel_unshuffle", "col2im", "max_unpool2d",
    "_upsample_nearest_exact3d", "channel_shuffle", "max_unpool3d", rows=pool,
)  # fmt: skip
record("grid_sampler_2d", "grid_sampler_3d", rows=grid_sample)
record("affine_grid_generator", "fractional_max_pool2d", "fractional_max_pool3d", rows=first_dim)
record(
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", rows=elementwise_loss,
)  # fmt: skip
record("nll_loss_forward", rows=class_loss, workspace=nothing)
record("nll_loss2d_forward", "multilabel_margin_loss_forward", "multi_margin_loss", rows=class_loss)
record("_ctc_loss", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss", rows=aligned_loss)
record("_cdist_forward", rows=distances)
record("_pdist_forward", rows=own_distances)
record("zeros", "ones", "full", "scalar_tensor", rows=create, workspace=nothing)
record("lift_fresh", rows=lift, elements=Elements.SAME)
record(
    "empty", "empty_strided", "new_empty_strided", "empty_permuted", rows=create, workspace=nothing, kernel=no_kernel,
)  # fmt: skip
record(
    "zero", "fill", "zeros_like", "new_zeros", "ones_like", "new_ones", "full_like", "new_full", rows=create,
    elements=Elements.NONE, workspace=nothing,
)  # fmt: skip
record("new_empty", "empty_like", rows=create, elements=Elements.NONE, workspace=nothing, kernel=no_kernel)
record(
    "rand", "randn", "randint", "normal", "uniform", "exponential", "normal_functional", "log_normal", "cauchy",
    "geometric", "random", rows=create,
)  # fmt: skip
record("rand_like", "randn_like", "randint_like", rows=create, elements=Elements.NONE)
record("arange", rows=arange, workspace=nothing)
record("linspace", "logspace", "randperm", "eye", "tril_indices", "triu_indices", "hann_window", "range", rows=arange)
record("_thnn_fused_lstm_cell", "mkldnn_rnn_layer", "_thnn_fused_gru_cell", rows=recurrent)
record("native_layer_norm_backward", "_fused_rms_norm_backward", workspace=workspace_layers.norm_backward)
record("native_group_norm_backward", workspace=workspace_layers.group_norm_backward)
record(
    "avg_pool2d_backward", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d_backward",
    "upsample_bilinear2d_backward", "upsample_nearest2d_backward", workspace=workspace_layers.grid,
)  # fmt: skip
