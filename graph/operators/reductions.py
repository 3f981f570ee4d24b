"""Rules for operators that work along dimensions: sums, averages, extremes, normalisations, orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .record import OperatorCall, nonlinear, plain, rule
from .states import ONE, ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale, whole
from .views import moved

PER_ROW = Scale(power=1)


def dims_of(given: Any, value: torch.Tensor) -> set[int]:
    """The dimensions that an argument names; all for None or an empty list."""
    names = [given] if isinstance(given, int) else list(given or range(value.dim()))
    return {dim % max(1, value.dim()) for dim in names}


def reduced(state: RowState, value: torch.Tensor, dims: set[int], keep: bool) -> RowState:
    """The state of a value without some dimensions, which carry no rows."""
    left = [d for d in range(value.dim()) if d not in dims]
    return moved(state, [d if keep and d not in dims else left.index(d) if d in left else None
                         for d in range(value.dim())])  # fmt: skip


@rule("sum", "mean", "nansum")
def added_up(call: OperatorCall) -> RowState:
    """A sum or average: over rows it gives a total."""
    value, state = call["self"], call.state("self")
    dims, keep = dims_of(call.given.get("dim"), value), bool(call.given.get("keepdim"))
    if isinstance(state, Permutation) or (call.name == "nansum" and isinstance(state, OverRows)):
        return nonlinear(call, state) or state
    if isinstance(state, ByRow) and state.dim in dims:
        return OverRows(scale=state.scale if call.name == "mean" else state.scale.times(PER_ROW))
    found = reduced(state, value, dims, keep)
    if isinstance(found, Free) and call.name != "mean":  # constants beside rows are as many as these
        count = math.prod(value.shape[dim] for dim in dims if dim < value.dim())
        return replace(found, scale=state.scale.times(call.watcher.scale(count)))
    return replace(found, step=0) if isinstance(found, ByRow) else found


@rule("cumsum")
def summed_so_far(call: OperatorCall) -> RowState:
    return along(call, "self", {call["dim"] % max(1, call["self"].dim())}, keep=True, linear=True)


@rule("amax", "amin", "prod", "var", "std", "linalg_vector_norm", "norm", "logsumexp", "all", "any", "argmax",
      "argmin", "count_nonzero", "nanmedian", "max", "min", "median", "mode", "kthvalue", "var_mean", "std_mean",
      "aminmax")  # fmt: skip
def extreme(call: OperatorCall) -> RowState:
    """A reduction that is not linear."""
    if isinstance(call.given.get("other"), torch.Tensor):  # max and min of two tensors
        from .pointwise import elementwise

        return elementwise(call)
    value = call["self"]
    return along(call, "self", dims_of(call.given.get("dim"), value), bool(call.given.get("keepdim")))


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "cumprod", "logcumsumexp", "cummax", "cummin", "topk",
      "_safe_softmax", "renorm", "_weight_norm_interface")  # fmt: skip
def normalised(call: OperatorCall) -> RowState:
    """The same dimensions; each element depends on all others along one of them."""
    if call.name == "_weight_norm_interface":
        return Free(varies=whole(range(call["v"].dim()))) if _all_free(call) else call.mix(Kind.UNKNOWN)
    value = call["self"]
    return along(call, "self", dims_of(call["dim"], value), keep=True)


def _all_free(call: OperatorCall) -> bool:
    return all(isinstance(call.of(tensor), Free) for tensor in call.tensors())


def along(call: OperatorCall, name: str, dims: set[int], keep: bool, linear: bool = False) -> RowState:
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
    found = reduced(state, value, dims, keep)
    return found if linear else plain(found)


@rule("sort", "argsort", "msort")
def ordered(call: OperatorCall) -> RowState | list[RowState]:
    """Sorting along rows permutes them, and tells how; sorting a permutation gives its inverse."""
    value, state = call["self"], call.state("self")
    dim = call.given.get("dim")
    dim = (-1 if dim is None else dim) % max(1, value.dim())
    if isinstance(state, Permutation) and state.dim == dim and state.share == 1:
        inverse = replace(state, is_inverse=not state.is_inverse)
        return inverse if call.name == "argsort" else [Free(varies=whole({dim})), inverse]
    mixed = nonlinear(call, state)
    if mixed is not None:
        return mixed
    if not isinstance(state, ByRow) or state.dim != dim:
        return plain(state)
    order = call.watcher.new_order()
    places = Permutation(dim=dim, inner=state.inner, order=order)
    if value.dim() != 1:
        return call.mix(Kind.REORDERED)
    return places if call.name == "argsort" else [ByRow(dim=dim, inner=state.inner, order=order), places]


@rule("bincount", "histc", "histogram")
def counted(call: OperatorCall) -> RowState:
    """How many elements have each value: a sum over rows of what each row contributes."""
    state = call.state("self")
    mixed = nonlinear(call, state)
    if mixed is not None:
        return mixed
    return OverRows(scale=PER_ROW) if isinstance(state, ByRow) else Free(varies=whole({0}))


@rule("searchsorted")
def found_places(call: OperatorCall) -> RowState:
    """Positions of constants among sorted rows are counts of rows."""
    among, wanted = call.state("sorted_sequence"), call.state("self")
    if isinstance(among, ByRow) and among.order is not None and isinstance(wanted, Free):
        return OverRows(scale=PER_ROW)
    from .pointwise import operands, together

    if isinstance(among, Free) and call["sorted_sequence"].dim() == 1:
        return nonlinear(call, wanted) or plain(together(call, operands(call, "self"), call.results()[0].shape))
    return nonlinear(call, among, wanted) or call.mix(Kind.ACROSS)


def total_of(call: OperatorCall, states: Sequence[RowState], reduction: int) -> RowState:
    """The state of a loss over rows, by torch's number of the reduction: 0 for none, 1 for mean, 2 for sum."""
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    if not any(isinstance(state, ByRow) for state in states):
        return Free()
    return OverRows(scale=ONE if reduction == 1 else PER_ROW)


__all__ = ["Mixed", "along", "dims_of", "reduced", "total_of"]
