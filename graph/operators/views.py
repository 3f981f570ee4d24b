"""Records of operators that give the same elements another shape, or a part of them, or several values as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .pointwise import spread
from .record import Elements, RowCall, nothing, record
from .states import (
    ByRow,
    Free,
    Kind,
    Mixed,
    OneRow,
    OverRows,
    Permutation,
    RowState,
    Scale,
    Stretch,
    differs,
    flat_inner,
    place,
    whole,
)


def move_dims(state: RowState, dims: Sequence[int | None]) -> RowState:
    """The state of a value whose dimension d is a view's dimension `dims[d]`; None where that dimension is gone."""
    if isinstance(state, ByRow | Permutation):
        dim = dims[state.dim]
        assert dim is not None
        return replace(state, dim=dim)
    if isinstance(state, Free):
        new = {old: dim for old, dim in enumerate(dims) if dim is not None}
        counts = (new[state.counts[0]], state.counts[1]) if state.counts and state.counts[0] in new else None
        return replace(
            state, varies=frozenset((new[d], low, high) for d, low, high in state.varies if d in new), counts=counts
        )
    return state


def reshape(call: RowCall) -> RowState:
    old, new, state = call["self"].shape, call.results()[0].shape, call.state("self")
    if isinstance(state, ByRow | Permutation):
        found = place(new, flat_inner(old, state.dim, state.inner), call.rows)
        if found is None:
            return call.mix(Kind.REORDERED) if call.rows > 1 else call.unclear()
        if isinstance(state, Permutation) or state.order is not None:
            whole = new[found[0]] == old[state.dim]  # a permutation is one of whole dimensions
            return replace(state, dim=found[0], inner=found[1]) if whole else call.mix(Kind.REORDERED)
        return replace(state, dim=found[0], inner=found[1])
    return _reshape_free(state, old, new) if isinstance(state, Free) else state


def _reshape_free(state: Free, old: Sequence[int], new: Sequence[int]) -> Free:
    """Values differ along the new dimensions, or parts of them, where the old ones end up."""
    spans = [_flat(old, span) for span in state.varies]
    found: set[Stretch] = set()
    counts = None
    for dim, size in enumerate(new):
        low, high = math.prod(new[dim + 1 :]), math.prod(new[dim:])
        for bottom, top in spans:
            if size != 1 and low < top and bottom < high:
                found.add((dim, max(1, bottom // low), min(size, -(-top // low))))
        if state.counts and old[state.counts[0]] == size and low == math.prod(old[state.counts[0] + 1 :]):
            counts = (dim, state.counts[1])
    return replace(state, varies=frozenset(found), counts=counts)


def _flat(shape: Sequence[int], span: Stretch) -> tuple[int, int]:
    """The begin and the end of a span of a contiguous value, counted in elements."""
    dim, low, high = span
    each = math.prod(shape[dim + 1 :])
    return each * low, each * min(high, shape[dim])


def permute(call: RowCall) -> RowState:
    value = call["self"]
    count = value.dim()
    order = list(range(count))
    if call.name == "permute":
        order = [d % count for d in call["dims"]]
    elif count > 1:
        a, b = (call["dim0"] % count, call["dim1"] % count) if call.name == "transpose" else (0, 1)
        order[a], order[b] = b, a
    return move_dims(call.tensor_state(value), [order.index(d) for d in range(count)])


def unsqueeze(call: RowCall) -> RowState:
    value = call["self"]
    at = call["dim"] % (value.dim() + 1)
    return move_dims(call.tensor_state(value), [d + (d >= at) for d in range(value.dim())])


def squeeze(call: RowCall) -> RowState:
    value, given = call["self"], call.given.get("dim")
    asked = range(value.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = {d % value.dim() for d in asked if value.dim() and value.shape[d % value.dim()] == 1}
    state = call.tensor_state(value)
    if isinstance(state, ByRow | Permutation) and state.dim in gone:
        return call.unclear()
    left = [d for d in range(value.dim()) if d not in gone]
    return move_dims(state, [left.index(d) if d in left else None for d in range(value.dim())])


def expand(call: RowCall) -> RowState:
    return spread(call, call.state("self"), call["self"].shape, call.results()[0].shape)


def repeat(call: RowCall) -> RowState:
    value, times, state = call["self"], call["repeats"], call.state("self")
    before = len(times) - value.dim()
    if isinstance(state, Free):
        found = move_dims(state, [d + before for d in range(value.dim())])
        assert isinstance(found, Free)
        again = [d for d, n in enumerate(times) if n != 1 and d >= before and value.shape[d - before] != 1]
        return replace(found, varies=found.varies | whole(again) if found.varies else found.varies, counts=None)
    if isinstance(state, Permutation) or (isinstance(state, ByRow) and state.order is not None):
        is_repeated = times[state.dim + before] != 1
        return call.mix(Kind.REORDERED) if is_repeated else move_dims(state, _shift_dims(value, before))
    if isinstance(state, ByRow) and value.shape[state.dim] == 1 and times[state.dim + before] != 1:
        return call.unclear()
    return move_dims(state, _shift_dims(value, before))


def _shift_dims(value: torch.Tensor, before: int) -> list[int | None]:
    return [d + before for d in range(value.dim())]


def slice_dim(call: RowCall) -> RowState:
    value = call["self"]
    dim, start, step = call["dim"] % value.dim(), call["start"] or 0, call["step"] or 1
    size = call.results()[0].shape[dim]
    return part(call, call.tensor_state(value), value, dim, start % max(1, value.shape[dim]), size, step)


def narrow(call: RowCall) -> RowState:
    value, dim = call["self"], call["dim"] % call["self"].dim()
    return part(call, call.tensor_state(value), value, dim, call["start"] % max(1, value.shape[dim]), call["length"])


def part(
    call: RowCall, state: RowState, value: torch.Tensor, dim: int, start: int, size: int, step: int = 1
) -> RowState:
    """The state of `size` elements of a value along a dimension, `step` apart. Whole runs of rows stay rows, and
    what is of one row is that."""
    if isinstance(state, Free):
        return replace(state, counts=None) if state.counts and state.counts[0] == dim and start else state
    if not isinstance(state, ByRow | Permutation) or state.dim != dim:
        return state
    if call.rows == 1:
        return call.unclear()
    if size == value.shape[dim] and step == 1:
        return state
    each = call.rows * state.inner
    if step != 1 or not isinstance(state, ByRow) or state.order is not None:
        return call.mix(Kind.REORDERED)
    if start % each == 0 and size % each == 0:
        return state
    before = start % state.inner
    return one_row(call, state, start, size) if 0 < size <= state.inner - before else call.mix(Kind.REORDERED)


def one_row(call: RowCall, state: ByRow, start: int, size: int) -> OneRow:
    """The state of a part that is of one row: `size` elements along its dimension."""
    place, before = divmod(start, state.inner)
    return OneRow(scale=state.scale, number=place % call.rows, part=(place // call.rows, before, size))


def select(call: RowCall) -> RowState:
    return _select(call, call["index"])


def unbind(call: RowCall) -> list[RowState]:
    return [_select(call, i) for i in range(len(call.results()))]


def _select(call: RowCall, index: int) -> RowState:
    value, state = call["self"], call.state("self")
    dim = call["dim"] % value.dim()
    if not isinstance(state, ByRow | Permutation) or state.dim != dim:
        return move_dims(state, [d - (d > dim) if d != dim else None for d in range(value.dim())])
    if call.rows == 1:
        return call.unclear()
    if not isinstance(state, ByRow) or state.order is not None:
        return call.mix(Kind.ROW_NUMBER)
    return one_row(call, state, index % value.shape[dim], 1)


def split(call: RowCall) -> list[RowState]:
    value = call["self"]
    dim, start, found = call["dim"] % value.dim(), 0, []
    for piece in call.results():
        found.append(part(call, call.tensor_state(value), value, dim, start, piece.shape[dim]))
        start += piece.shape[dim]
    return found


def concatenate(call: RowCall) -> RowState:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    out = call.results()[0]
    dim = call["dim"] % max(1, out.dim())
    return join(call, [value.shape[dim] for value in values], dim, [call.tensor_state(value) for value in values])


def stack(call: RowCall) -> RowState:
    out = call.results()[0]
    at = call["dim"] % out.dim()
    states = [move_dims(call.tensor_state(v), [d + (d >= at) for d in range(v.dim())]) for v in call["tensors"]]
    return join(call, [1] * len(states), at, states)


def join(call: RowCall, sizes: Sequence[int], dim: int, states: Sequence[RowState]) -> RowState:
    """The state of values put one after another along a dimension, which has these sizes in them."""
    if any(isinstance(state, Mixed) for state in states):
        return Mixed()
    if any(isinstance(state, OneRow) for state in states):
        return _join_rows(call, sizes, dim, states)
    if any(isinstance(state, Permutation) for state in states):
        return call.mix(Kind.REORDERED)
    rows = [state for state in states if isinstance(state, ByRow)]
    totals = [state for state in states if isinstance(state, OverRows)]
    if totals:
        powers, unsure = {total.scale.power for total in totals}, any(total.scale.unsure for total in totals)
        is_even = len(totals) == len(states) and len(powers) == 1
        return OverRows(scale=Scale(powers.pop(), unsure)) if is_even else call.mix(Kind.REUSED)
    if not rows:
        return _join_constants(states, dim)
    first = replace(rows[0], step=0)
    if any((row.dim, row.inner, row.order) != (first.dim, first.inner, first.order) for row in rows):
        return call.mix(Kind.PAIRS)
    if first.dim == dim and (len(rows) < len(states) or first.order is not None):
        return call.mix(Kind.ROW_NUMBER)
    if any(isinstance(state, Free) and differs(state, first.dim, first.inner, call.rows) for state in states):
        call.watcher.note(Kind.ROW_NUMBER)
    return first


def _join_rows(call: RowCall, sizes: Sequence[int], dim: int, states: Sequence[RowState]) -> RowState:
    """The state of values of single rows: the rows, if all are there in their order, with equal parts."""
    numbers = [state.number if isinstance(state, OneRow) else -1 for state in states]
    of_row = [sum(size for size, number in zip(sizes, numbers) if number == row) for row in range(call.rows)]
    scales = {state.scale for state in states}
    if -1 in numbers or numbers != sorted(numbers) or len({*of_row, *scales}) != 2 or not of_row[0]:
        return call.mix(Kind.ROW_NUMBER)
    return ByRow(scale=scales.pop(), dim=dim, inner=of_row[0])


def _join_constants(states: Sequence[RowState], dim: int) -> Free:
    varies = frozenset().union(*(state.varies for state in states if isinstance(state, Free)))
    return Free(varies=varies | whole({dim}) if len(states) > 1 else varies)


def pad(call: RowCall) -> RowState:
    """The last dimensions grow, or shrink where a number is negative; they may move and keep their size."""
    numbers = call.given["padding"] if "padding" in call.given else call["pad"]
    if isinstance(call.state("self"), OverRows) and call.given.get("value"):
        return call.mix(Kind.UNEVEN)
    last = call["self"].dim() - 1
    return _but_dims(call, {last - i // 2 for i, number in enumerate(numbers) if number})


def _but_dims(call: RowCall, changed: set[int]) -> RowState:
    state = call.state("self")
    if isinstance(state, ByRow | Permutation) and state.dim in changed:
        return call.mix(Kind.ROW_NUMBER)
    return Free(varies=state.varies | whole(changed)) if isinstance(state, Free) else state


def flip(call: RowCall) -> RowState:
    value, state = call["self"], call.state("self")
    dims = {d % value.dim() for d in call["dims"]} or set(range(value.dim()))
    if isinstance(state, ByRow | Permutation) and state.dim in dims:
        return call.mix(Kind.REORDERED)
    return replace(state, counts=None) if isinstance(state, Free) else state


def turn(call: RowCall) -> RowState:
    """A turn by right angles in the plane of two dimensions."""
    value, state = call["self"], call.state("self")
    times, (first, second) = call["k"] % 4, (dim % value.dim() for dim in call["dims"])
    turned = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[times]  # their elements are in reverse order
    if isinstance(state, ByRow | Permutation) and state.dim in turned:
        return call.mix(Kind.REORDERED)
    swapped = {first: second, second: first} if times % 2 else {}
    found = move_dims(state, [swapped.get(dim, dim) for dim in range(value.dim())])
    return replace(found, counts=None) if isinstance(found, Free) else found


def unfold(call: RowCall) -> RowState:
    """Windows along a dimension; their elements become the last one."""
    value = call["self"]
    dim, state = call["dimension"] % max(1, value.dim()), call.state("self")
    if isinstance(state, ByRow | Permutation) and state.dim == dim:
        return call.mix(Kind.REORDERED)
    return Free(varies=state.varies | whole({dim, value.dim()})) if isinstance(state, Free) else state


def on_diagonal(call: RowCall) -> RowState:
    value, state = call["self"], call.state("self")
    taken = {call["dim1"] % value.dim(), call["dim2"] % value.dim()}
    if isinstance(state, ByRow | Permutation) and state.dim in taken:
        return call.mix(Kind.REORDERED)
    left = [d for d in range(value.dim()) if d not in taken]
    found = move_dims(state, [left.index(d) if d in left else None for d in range(value.dim())])
    return Free(varies=found.varies | whole({len(left)})) if isinstance(found, Free) else found


def embed_diagonal(call: RowCall) -> RowState:
    """The last dimension as the diagonal of two new ones, zeros beside it."""
    value, state, count = call["self"], call.state("self"), call.results()[0].dim()
    new = {call["dim1"] % count, call["dim2"] % count}
    if isinstance(state, ByRow | Permutation) and state.dim == value.dim() - 1:
        return call.mix(Kind.ROW_NUMBER)
    found = move_dims(state, [*(d for d in range(count) if d not in new), None])
    return Free(varies=found.varies | whole(new)) if isinstance(found, Free) else found


def trace(call: RowCall) -> RowState:
    state = call.state("self")
    if isinstance(state, ByRow | Permutation):
        return call.mix(Kind.REORDERED)
    return Free() if isinstance(state, Free) else state


def restride(call: RowCall) -> RowState:
    value, out, state = call["self"], call.results()[0], call.state("self")
    if isinstance(state, Free):
        return Free(varies=whole(range(out.dim())) if state.varies else frozenset())
    if value.shape == out.shape and value.stride() == out.stride():
        return state
    if isinstance(state, ByRow) and state.order is None and value.is_contiguous():
        step = flat_inner(value.shape, state.dim, state.inner)
        dims = [d for d in range(out.dim()) if out.stride(d) == step and out.shape[d] == call.rows]
        reach = sum((n - 1) * s for d, (n, s) in enumerate(zip(out.shape, out.stride())) if d not in dims)
        if len(dims) == 1 and reach < step:  # the others stay within a row
            return replace(state, dim=dims[0], inner=1)
    return state if isinstance(state, OverRows | Mixed) else call.mix(Kind.REORDERED)


record("view", "_reshape_alias", "_reshape_copy", rows=reshape, elements=Elements.RESHAPED)
record("_unsafe_view", rows=reshape, elements=Elements.RESHAPED, workspace=nothing)
record("permute", "transpose", "t", rows=permute, elements=Elements.MOVED)
record("unsqueeze", rows=unsqueeze, elements=Elements.RESHAPED)
record("squeeze", rows=squeeze, elements=Elements.RESHAPED)
record("expand", rows=expand, elements=Elements.SPREAD)
record("repeat", rows=repeat, elements=Elements.SPREAD, workspace=nothing)
record("slice", rows=slice_dim, elements=Elements.PART)
record("narrow", rows=narrow, elements=Elements.PART)
record("select", rows=select, elements=Elements.PART)
record("unbind", rows=unbind)
record("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", rows=split)
record("cat", rows=concatenate, elements=Elements.JOINED, workspace=nothing)
record("stack", rows=stack, elements=Elements.JOINED, workspace=nothing)
record("constant_pad_nd", rows=pad, workspace=nothing)
record(
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", rows=pad,
)  # fmt: skip
record("flip", "roll", rows=flip, workspace=nothing)
record("rot90", rows=turn)
record("unfold", rows=unfold)
record("diagonal", rows=on_diagonal)
record("diag_embed", rows=embed_diagonal)
record("trace", rows=trace)
record("as_strided", rows=restride)
record("select_backward", "slice_backward", workspace=nothing)
