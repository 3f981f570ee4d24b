"""Records of operators that work along dimensions: sums, averages, extremes, normalisations, orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .pointwise import combine, elementwise, operands, together
from .record import OperatorCall, RowCall, nonlinear, nothing, operator_of, plain, record
from .states import ONE, ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale, whole
from .views import move_dims
from .workspace import layers as workspace_layers
from .workspace import orders as workspace_orders
from .workspace import reductions as workspace_reductions
from .workspace import scans as workspace_scans

PER_ROW = Scale(power=1)


def dims_of(given: Any, value: torch.Tensor) -> set[int]:
    """The dimensions that an argument names; all for None or an empty list."""
    names = [given] if isinstance(given, int) else list(given or range(value.dim()))
    return {dim % max(1, value.dim()) for dim in names}


def drop_dims(state: RowState, value: torch.Tensor, dims: set[int], keep: bool) -> RowState:
    """The state of a value without some dimensions, which carry no rows."""
    left = [d for d in range(value.dim()) if d not in dims]
    return move_dims(state, [d if keep and d not in dims else left.index(d) if d in left else None
                         for d in range(value.dim())])  # fmt: skip


def added_up(call: RowCall) -> RowState:
    """A sum or average, or a number of elements: over rows it gives a total."""
    value, state = call["self"], call.state("self")
    dims, keep = dims_of(call.given.get("dim"), value), bool(call.given.get("keepdim"))
    is_linear = call.name in ("sum", "mean")
    if isinstance(state, Permutation) or (isinstance(state, OverRows) and not is_linear):
        return nonlinear(call, state) or state
    if isinstance(state, ByRow) and state.dim in dims:
        return OverRows(scale=state.scale if call.name == "mean" else state.scale.times(PER_ROW))
    found = drop_dims(state, value, dims, keep)
    count = math.prod(value.shape[dim] for dim in dims if dim < value.dim())
    if isinstance(found, OverRows) and call.name == "mean":  # of totals, whose number may grow with the rows
        scale = call.watcher.scale(count)
        return found if count % call.rows else OverRows(scale=found.scale.divide_by(scale))
    if isinstance(found, Free) and call.name != "mean":  # constants beside rows are equal to them in number
        return replace(found, scale=state.scale.times(call.watcher.scale(count)))
    return replace(found, step=0) if isinstance(found, ByRow) else found


def cumulative_sum(call: RowCall) -> RowState:
    return reduce_along(call, "self", {call["dim"] % max(1, call["self"].dim())}, keep=True, linear=True)


def fourier(call: RowCall) -> RowState:
    """A Fourier transform: linear, each element of all elements along its dimensions."""
    return reduce_along(call, "self", dims_of(call["dim"], call["self"]), keep=True, linear=True)


def cross_product(call: RowCall) -> RowState:
    """A cross product of vectors along a dimension."""
    out = call.results()[0]
    state = combine(call, operands(call), out.shape)
    is_along = isinstance(state, ByRow) and state.dim == call["dim"] % out.dim()
    return call.mix(Kind.ACROSS) if is_along else state


def extreme(call: RowCall) -> RowState:
    """A reduction that is not linear."""
    if isinstance(call.given.get("other"), torch.Tensor):  # max and min of two tensors
        return elementwise(call)
    value = call["self"]
    return reduce_along(call, "self", dims_of(call.given.get("dim"), value), bool(call.given.get("keepdim")))


def normalise(call: RowCall) -> RowState:
    """The same dimensions; each element depends on all others along one of them."""
    if call.name == "_weight_norm_interface":
        if all(isinstance(call.tensor_state(tensor), Free) for tensor in call.tensors()):
            return Free(varies=whole(range(call["v"].dim())))
        return call.mix(Kind.UNKNOWN)
    return reduce_along(call, "self", dims_of(call["dim"], call["self"]), keep=True)


def renormalise(call: RowCall) -> RowState:
    """Each slice along a dimension divided by what all of its elements give."""
    value = call["self"]
    others = set(range(value.dim())) - dims_of(call["dim"], value)
    return reduce_along(call, "self", others, keep=True)


def draw_classes(call: RowCall) -> RowState:
    """Numbers drawn by probabilities along the last dimension."""
    return reduce_along(call, "self", {call["self"].dim() - 1}, keep=True)


def reduce_along(call: RowCall, name: str, dims: set[int], keep: bool, linear: bool = False) -> RowState:
    """The state of a result each of whose elements depends on all elements along `dims`."""
    value, state = call[name], call.state(name)
    if isinstance(state, OverRows) and linear:
        return state
    mixed = nonlinear(call, state)
    if mixed is not None:
        return mixed
    if isinstance(state, ByRow) and state.dim in dims:
        return call.mix(Kind.ACROSS)
    if isinstance(state, Free) and keep:
        return Free(varies=state.varies | (whole(dims) if state.varies else frozenset()))
    found = drop_dims(state, value, dims, keep)
    return found if linear else plain(found)


def sort(call: RowCall) -> RowState | list[RowState]:
    """Sorting along rows permutes them, and tells how; sorting a permutation gives its inverse."""
    value, state = call["self"], call.state("self")
    dim = call.given.get("dim")
    dim = (-1 if dim is None else dim) % max(1, value.dim())
    if isinstance(state, Permutation) and state.dim == dim and state.share == 1:
        return [Free(varies=whole({dim})), replace(state, is_inverse=not state.is_inverse)]
    mixed = nonlinear(call, state)
    if mixed is not None:
        return mixed
    if not isinstance(state, ByRow) or state.dim != dim:
        return plain(state)
    order = call.watcher.new_order()
    places = Permutation(dim=dim, inner=state.inner, order=order)
    if value.dim() != 1:
        return call.mix(Kind.REORDERED)
    return [ByRow(dim=dim, inner=state.inner, order=order), places]


def histogram(call: RowCall) -> RowState:
    """The number of elements that have each value: a sum over rows of what each row contributes."""
    state = call.state("self")
    mixed = nonlinear(call, state)
    if mixed is not None:
        return mixed
    return _total(PER_ROW, [state]) if isinstance(state, ByRow) else Free(varies=whole({0}))


def search_places(call: RowCall) -> RowState:
    """Positions of constants among sorted rows are counts of rows."""
    among, wanted = call.state("sorted_sequence"), call.state("self")
    if isinstance(among, ByRow) and among.order is not None and isinstance(wanted, Free):
        return _total(PER_ROW, [among, wanted])
    if isinstance(among, Free) and call["sorted_sequence"].dim() == 1:
        return nonlinear(call, wanted) or plain(together(call, operands(call, "self"), call.results()[0].shape))
    return nonlinear(call, among, wanted) or call.mix(Kind.ACROSS)


def total_of(call: RowCall, states: Sequence[RowState], reduction: int) -> RowState:
    """The state of a loss over rows, by torch's number of the reduction: 0 for none, 1 for mean, 2 for sum."""
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    if not any(isinstance(state, ByRow) for state in states):
        return Free()
    return _total(ONE if reduction == 1 else PER_ROW, states)


def _total(scale: Scale, states: Sequence[RowState]) -> OverRows:
    """A total over rows that is not linear in its operands, so that a factor of theirs is no factor of it."""
    return OverRows(scale=replace(scale, unsure=any(state.scale != ONE for state in states)))


__all__ = ["Mixed", "dims_of", "drop_dims", "reduce_along", "total_of"]


def is_over_last(call: OperatorCall) -> bool:
    """Whether a call reads each row of the last dimension by itself, all of it."""
    if operator_of(call.func).rows not in (added_up, extreme, normalise) or "dim" not in call.given:
        return False
    value = call.tensor("self")
    return dims_of(call["dim"], value) == {value.dim() - 1}


record("_fft_c2c", "_fft_r2c", "_fft_c2r", rows=fourier)
record("linalg_cross", rows=cross_product)
record("sum", "mean", "nansum", rows=added_up, workspace=workspace_reductions.reduction)
record("cumsum", rows=cumulative_sum, workspace=workspace_scans.scan)
record(
    "amax", "amin", "prod", "linalg_vector_norm", "norm", "all", "any", rows=extreme,
    workspace=workspace_reductions.reduction,
)  # fmt: skip
record("var", "std", "var_mean", "std_mean", rows=extreme, workspace=workspace_reductions.variance)
record("logsumexp", rows=extreme, workspace=workspace_reductions.logsumexp)
record("argmax", "argmin", "max", "min", rows=extreme, workspace=workspace_reductions.largest)
record("count_nonzero", rows=added_up)
record("nanmedian", "hash_tensor", "median", "mode", "kthvalue", "aminmax", rows=extreme)
record("_softmax", "_log_softmax", rows=normalise, workspace=nothing)
record("cumprod", "logcumsumexp", rows=normalise, workspace=workspace_scans.scan)
record("cummax", "cummin", rows=normalise, workspace=workspace_scans.largest_so_far)
record("topk", rows=normalise, workspace=workspace_orders.topk)
record("_safe_softmax", "_weight_norm_interface", rows=normalise)
record("renorm", rows=renormalise)
record("multinomial", "_sample_dirichlet", rows=draw_classes)
record("sort", rows=sort, workspace=workspace_orders.sort)
record("bincount", "histc", "histogram", rows=histogram)
record("searchsorted", rows=search_places, workspace=nothing)
record("_softmax_backward_data", workspace=workspace_layers.softmax_backward)
record("_logcumsumexp", workspace=workspace_scans.scan)
record("_cummax_helper", "_cummin_helper", workspace=workspace_scans.largest_so_far)
record("_log_softmax_backward_data", workspace=nothing)
