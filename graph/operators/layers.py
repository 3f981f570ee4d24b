"""Rules for normalisations, pooling, losses and what makes new values."""

from __future__ import annotations

import torch

from .pointwise import combined, operands
from .record import OperatorCall, nonlinear, plain, rule
from .reductions import total_of
from .states import ByRow, Free, Kind, OverRows, RowState, differs, whole


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
      "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
      "_batch_norm_with_update_functional", "_batch_norm_no_update")  # fmt: skip
def batch_normed(call: OperatorCall) -> RowState:
    """In training mode the statistics are those of all rows, channel by channel."""
    state = call.state("input")
    training = call.given.get("training", call.name.startswith("_batch_norm_with"))
    has_rows = isinstance(state, ByRow) and state.dim != 1
    if training and has_rows:
        call.watcher.met(Kind.BATCH_NORM)
    return nonlinear(call, state) or plain(state)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_normed(call: OperatorCall) -> RowState:
    value, state = call["input"], call.state("input")
    if isinstance(state, ByRow) and state.dim >= value.dim() - len(call["normalized_shape"]):
        return call.mix(Kind.ACROSS)
    mixed = nonlinear(call, state)
    last = whole(range(value.dim() - len(call["normalized_shape"]), value.dim()))
    return mixed or (Free(varies=state.varies | last) if isinstance(state, Free) else plain(state))


@rule("native_group_norm", "group_norm")
def group_normed(call: OperatorCall) -> RowState:
    return first_dims(call, "input", 1)


def first_dims(call: OperatorCall, name: str, count: int) -> RowState:
    """Each element depends on elements with the same place in the first `count` dimensions."""
    value, state = call[name], call.state(name)
    if isinstance(state, ByRow) and state.dim >= count:
        return call.mix(Kind.ACROSS)
    return nonlinear(call, state) or (
        Free(varies=whole(range(value.dim()))) if isinstance(state, Free) else plain(state)
    )


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d",
      "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "max_pool1d", "max_pool3d",
      "mkldnn_max_pool2d",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d",
      "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "im2col",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "pixel_shuffle", "pixel_unshuffle", "col2im",
      "max_unpool2d", "_upsample_nearest_exact3d", "channel_shuffle", "native_channel_shuffle")  # fmt: skip
def pooled(call: OperatorCall) -> RowState:
    """Rows and channels stay apart; images without a batch have three dimensions and no rows in them."""
    value, state = call["self"], call.state("self")
    spatial = 3 if "3d" in call.name else 1 if "1d" in call.name else 2
    channels_too = call.name in ("pixel_shuffle", "pixel_unshuffle", "im2col", "col2im", "native_channel_shuffle")
    first = max(1 if channels_too else 0, value.dim() - spatial - channels_too)
    linear = "max" not in call.name
    return state if isinstance(state, OverRows) and linear else first_dims(call, "self", max(1, first))


@rule("grid_sampler_2d", "grid_sampler_3d")
def sampled(call: OperatorCall) -> RowState:
    parts = [(call.state("input"), call["input"].shape), (call.state("grid"), call["grid"].shape)]
    states = [state for state, _ in parts]
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    if all((isinstance(state, ByRow) and state.dim == 0) or isinstance(state, Free) for state in states):
        return next((plain(state) for state in states if isinstance(state, ByRow)), Free(varies=whole(range(5))))
    return call.mix(Kind.ACROSS)


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
      "binary_cross_entropy_with_logits", "l1_loss", "kl_div", "poisson_nll_loss")  # fmt: skip
def elementwise_loss(call: OperatorCall) -> RowState:
    parts = operands(call)
    reduction = call.given.get("reduction", 1)
    if isinstance(reduction, str):
        reduction = {"none": 0, "mean": 1, "sum": 2}[reduction]
    if reduction == 0:
        return combined(call, parts, call.results()[0].shape)
    whole = torch.broadcast_shapes(*(shape for _, shape in parts))
    return total_of(call, [combined(call, parts, whole)], reduction)


@rule("nll_loss_forward", "nll_loss2d_forward", "multilabel_margin_loss_forward", "multi_margin_loss", "nll_loss",
      "nll_loss2d")  # fmt: skip
def class_loss(call: OperatorCall) -> RowState:
    """A loss per row, with classes along dimension 1; with one dimension, of a single row."""
    value, state, target = call["self"], call.state("self"), call.state("target")
    mixed = nonlinear(call, state, target)
    if mixed is not None:
        return mixed
    rows = [s for s in (state, target) if isinstance(s, ByRow)]
    if any(s.dim == 1 and v.dim() > 1 for s, v in ((state, value),) if isinstance(s, ByRow)):
        return call.mix(Kind.ACROSS)
    dims = {_loss_dim(s, s is state and value.dim() > 1) for s in rows}
    if len(dims) > 1:
        return call.mix(Kind.PAIRS)
    if rows and isinstance(target, Free) and differs(target, 0, rows[0].inner, call.rows):
        call.watcher.met(Kind.ROW_NUMBER)
    if call["reduction"] != 0:
        return total_of(call, [state, target], call["reduction"])
    return ByRow(dim=next(iter(dims))[0], inner=rows[0].inner, order=rows[0].order) if rows else Free()


def _loss_dim(state: ByRow, has_classes: bool) -> tuple[int, int, int | None]:
    dim = state.dim - (has_classes and state.dim > 1)
    return dim, state.inner, state.order


@rule("_ctc_loss", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss")
def aligned_loss(call: OperatorCall) -> RowState:
    """One loss a row. Targets lie row by row, or one after another with their lengths beside them."""
    state = call.state("log_probs")
    if isinstance(state, ByRow) and state.dim == 1:
        return ByRow(dim=0, inner=state.inner)
    return nonlinear(call, state) or (Free() if isinstance(state, Free) else call.mix(Kind.ACROSS))


@rule("_cdist_forward", "cdist")
def distances(call: OperatorCall) -> RowState:
    """Each element of one side meets each of the other."""
    states = [call.state("x1"), call.state("x2")]
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    out, parts = call.results()[0].dim(), [call["x1"], call["x2"]]
    places: set[tuple[int, int]] = set()
    for i, (state, value) in enumerate(zip(states, parts)):
        if isinstance(state, ByRow):
            last = state.dim == value.dim() - 2
            places.add((out - 2 + i if last else state.dim + out - value.dim(), state.inner))
    if not places:
        return Free(varies=whole(range(out)))
    if len(places) > 1:
        return call.mix(Kind.PAIRS)
    dim, inner = next(iter(places))
    return ByRow(dim=dim, inner=inner)


@rule("_pdist_forward")
def own_distances(call: OperatorCall) -> RowState:
    state = call.state("self")
    return nonlinear(call, state) or (Free(varies=whole({0})) if isinstance(state, Free) else call.mix(Kind.PAIRS))


@rule("zeros", "zeros_like", "new_zeros", "zero", "new_empty", "empty", "empty_like", "ones", "ones_like", "new_ones",
      "full", "full_like", "new_full", "fill", "scalar_tensor", "empty_strided", "new_empty_strided", "empty_permuted",
      "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "uniform", "exponential",
      "normal_functional", "log_normal", "cauchy", "geometric", "random", "efficientzerotensor")  # fmt: skip
def made(call: OperatorCall) -> RowState:
    """The same value everywhere, or drawn anew for each element."""
    zeros = call.name in ("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty")
    number = call.given.get("fill_value", call.given.get("value", call.given.get("s")))
    if isinstance(number, torch.Tensor):
        from .pointwise import spread

        return spread(call, call.of(number), number.shape, call.results()[0].shape)
    if number is None or isinstance(number, bool):
        return Free(is_zero=zeros)
    return Free(is_zero=number == 0, scale=call.watcher.scale(number))


@rule("arange", "linspace", "logspace", "randperm", "eye", "tril_indices", "triu_indices", "hann_window", "range")
def numbered(call: OperatorCall) -> RowState:
    out = call.results()[0]
    starts_at_0 = call.given.get("start") in (None, 0) and call.given.get("step") in (None, 1)
    counts = (0, 1) if call.name == "arange" and starts_at_0 and not out.is_floating_point() else None
    return Free(varies=whole(range(out.dim())), counts=counts)


@rule("_thnn_fused_lstm_cell", "mkldnn_rnn_layer", "_thnn_fused_gru_cell", "lstm", "gru")
def recurrent(call: OperatorCall) -> list[RowState]:
    """A layer of a recurrent network on (sequence, rows, features): rows lie along the last dimension but one."""
    states = [(call.of(tensor), tensor) for tensor in call.tensors()]
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
