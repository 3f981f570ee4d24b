"""Records of operators that pick elements by number, or write them to numbered places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .pointwise import Operand, combine, fill_state, operands, together
from .record import Elements, RowCall, constants, nonlinear, nothing, plain, record
from .reductions import PER_ROW
from .states import ANY_STEP, ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, differs, whole
from .views import move_dims
from .workspace import indexing as workspace_indexing
from .workspace import scans as workspace_scans


def gather(call: RowCall) -> RowState:
    """Elements at numbers along one dimension; the others are aligned."""
    value, dim = call["self"], call["dim"] % max(1, call["self"].dim())
    state, numbers = call.state("self"), call.state("index")
    mixed = nonlinear(call, numbers) if not isinstance(numbers, Permutation) else None
    if mixed is not None or isinstance(state, Mixed):
        return mixed or Mixed()
    if isinstance(state, ByRow) and state.dim == dim:
        return call.mix(Kind.REORDERED)
    shape = call["index"].shape
    if isinstance(state, OverRows):
        return state if isinstance(numbers, Free) else call.mix(Kind.REUSED)
    inside = move_dims(state, range(value.dim())) if not isinstance(state, Free) else _drop_dim(state, dim)
    found = together(call, [(inside, _cut(value, shape, dim)), (numbers, shape)], shape)
    return replace(found, scale=state.scale) if isinstance(found, ByRow) else plain(found)


def _drop_dim(state: Free, dim: int) -> Free:
    return Free(varies=frozenset(span for span in state.varies if span[0] != dim))


def _cut(value: torch.Tensor, shape: Sequence[int], dim: int) -> list[int]:
    """The part of a value's shape that aligns with numbers of this shape."""
    return [*shape[: value.dim()]]


def index_select(call: RowCall) -> RowState:
    numbers = [None] * call["self"].dim()
    numbers[call["dim"] % max(1, call["self"].dim())] = call["index"]
    return state_at_numbers(call, call["self"], numbers)


def index(call: RowCall) -> RowState:
    value = call["self"]
    return state_at_numbers(call, value, [*call["indices"], *[None] * (value.dim() - len(call["indices"]))])


def take(call: RowCall) -> RowState:
    """Elements at numbers counted over all dimensions."""
    state, numbers = call.state("self"), call.state("index")
    if not isinstance(state, Free):
        return nonlinear(call, state, numbers) or call.mix(Kind.REORDERED)
    return nonlinear(call, numbers) or (plain(numbers) if state.varies else Free())


def state_at_numbers(call: RowCall, value: torch.Tensor, numbers: Sequence[torch.Tensor | None]) -> RowState:
    """The state of `value[numbers]`; None takes a whole dimension."""
    used = [(d, n) for d, n in enumerate(numbers) if n is not None]
    state, states = call.tensor_state(value), [call.tensor_state(n) for _, n in used]
    if isinstance(state, Mixed) or any(isinstance(s, Mixed) for s in states):
        return Mixed()
    if any(isinstance(s, OverRows) for s in states):
        return call.mix(Kind.NONLINEAR)
    shape = torch.broadcast_shapes(*(n.shape for _, n in used))
    at = used[0][0] if [d for d, _ in used] == list(range(used[0][0], used[0][0] + len(used))) else 0
    left = [d for d, n in enumerate(numbers) if n is None]
    new = {d: i if i < at else i + len(shape) for i, d in enumerate(left)}
    if isinstance(state, OverRows):
        return state if all(isinstance(s, Free) for s in states) else call.mix(Kind.REUSED)
    parts: list[Operand] = [(s, n.shape) for s, (_, n) in zip(states, used)]
    if isinstance(state, ByRow) and state.dim not in new:
        return _rows_by_number(call, state, value, numbers, parts, shape, at)
    if any(isinstance(s, Permutation) for s in states):
        return call.mix(Kind.REORDERED)
    differing = {d for d, _, _ in state.varies} if isinstance(state, Free) else set[int]()
    if any(d in differing and isinstance(s, ByRow) and s.step == ANY_STEP for s, (d, _) in zip(states, used)):
        return call.mix(Kind.ROW_NUMBER)
    if isinstance(state, Free):  # numbers make no difference along dimensions where all is the same
        parts = [part for part, (d, _) in zip(parts, used) if d in differing or not isinstance(part[0], Free)]
    picked = together(call, parts, shape)
    if isinstance(picked, Mixed):
        return picked
    picked = move_dims(plain(picked), [d + at for d in range(len(shape))])
    rest = move_dims(state, [new.get(d) for d in range(value.dim())])
    if isinstance(rest, ByRow) and isinstance(picked, ByRow):
        return call.mix(Kind.PAIRS)
    if isinstance(rest, ByRow) or isinstance(picked, ByRow):
        return rest if isinstance(rest, ByRow) else picked
    if not isinstance(rest, Free) or not isinstance(picked, Free):
        return call.mix(Kind.REORDERED)
    return Free(varies=rest.varies | picked.varies)


def _rows_by_number(
    call: RowCall,
    state: ByRow,
    value: torch.Tensor,
    numbers: Sequence[torch.Tensor | None],
    parts: Sequence[Operand],
    shape: Sequence[int],
    at: int,
) -> RowState:
    """Rows picked by numbers: their own, in order, or a permutation of them."""
    own = numbers[state.dim]
    assert own is not None
    which = call.tensor_state(own)
    others = [part for part, n in zip(parts, [n for n in numbers if n is not None]) if n is not own]
    if isinstance(which, Permutation) and not others and own.dim() == 1:
        return _permute_rows(call, state, which, at)
    before = len(shape) - own.dim()
    counts = which.counts if isinstance(which, Free) else None
    counts_all = counts is not None and counts[1] == 1 and own.shape[counts[0]] == value.shape[state.dim]
    if state.order is None and counts is not None and counts_all:  # every place, in order
        dim = counts[0] + before
        rows = [(s, p) for s, p in others if isinstance(s, ByRow)]
        if any((s.dim + len(shape) - len(p), s.inner, s.order) != (dim, state.inner, None) for s, p in rows):
            return call.mix(Kind.PAIRS)
        return ByRow(scale=state.scale, dim=dim + at, inner=state.inner)
    is_own = isinstance(which, Free) and which.counts is not None and which.counts[1] == state.inner
    if state.order is None and is_own and isinstance(which, Free) and which.counts is not None:
        dim, inner = which.counts[0] + before, 1
        if own.shape[which.counts[0]] != call.rows:
            return call.mix(Kind.REORDERED)
        rows = [(s, p) for s, p in others if isinstance(s, ByRow)]
        if any((s.dim + len(shape) - len(p), s.inner, s.order) != (dim, 1, None) for s, p in rows):
            return call.mix(Kind.PAIRS)
        return ByRow(scale=state.scale, dim=dim + at, inner=inner)
    if state.order is None and isinstance(which, ByRow) and which.step in (state.inner, ANY_STEP):
        return ByRow(scale=state.scale, dim=which.dim + before + at, inner=which.inner)
    return call.mix(Kind.REORDERED)


def _permute_rows(call: RowCall, state: ByRow, which: Permutation, at: int) -> RowState:
    if state.order is None and not which.is_inverse and which.inner == state.inner * which.share:
        return replace(state, dim=at, inner=which.inner, order=which.order)
    if state.order == which.order and which.is_inverse and which.share == 1:
        return replace(state, dim=at, inner=which.inner, order=None)
    return call.mix(Kind.REORDERED)


def put(call: RowCall) -> RowState:
    """Elements written to numbered places."""
    value = call["self"]
    chosen, *others = [index for index in call["indices"] if index is not None]
    if chosen.dtype == torch.bool and not others and call["values"].numel() == 1:
        return _masked_write(call, value, chosen, call["indices"].index(chosen))
    numbers = [*call["indices"], *[None] * (value.dim() - len(call["indices"]))]
    return write(call, value, numbers, call["values"], bool(call["accumulate"]))


def _masked_write(call: RowCall, value: torch.Tensor, mask: torch.Tensor, first: int) -> RowState:
    """The state of a value after one number is written where a mask of its dimensions from `first` on holds."""
    aligned = [*mask.shape, *[1] * (value.dim() - first - mask.dim())]
    chosen = (call.tensor_state(mask), aligned)
    return fill_state(call, (call.tensor_state(value), value.shape), chosen, operands(call, "values"))


def put_along(call: RowCall) -> RowState:
    value, dim = call["self"], call["dim"] % max(1, call["self"].dim())
    numbers = [None] * value.dim()
    numbers[dim] = call["index"]
    source = call.given.get("source")
    if call.name == "index_fill" or source is None:
        source = call["value"] if isinstance(call["value"], torch.Tensor) else torch.empty(())
    return write(call, value, numbers, source, call.name == "index_add")


def write(
    call: RowCall, value: torch.Tensor, numbers: Sequence[torch.Tensor | None], source: torch.Tensor, adds: bool
) -> RowState:
    """The state of `value` after `value[numbers] = source`, or `+=` where it `adds`."""
    state, new = call.tensor_state(value), call.tensor_state(source)
    used = [(d, n) for d, n in enumerate(numbers) if n is not None]
    states = [call.tensor_state(n) for _, n in used]
    if any(isinstance(s, Mixed) for s in (state, new, *states)):
        return Mixed()
    if any(isinstance(s, OverRows) for s in (state, new, *states)):
        return call.mix(Kind.REUSED)
    shape = torch.broadcast_shapes(*(n.shape for _, n in used))
    at = used[0][0] if [d for d, _ in used] == list(range(used[0][0], used[0][0] + len(used))) else 0
    if all(isinstance(s, Free) for s in (new, *states)) and not _has_own_places(states, call, used):
        touched = state.dim if isinstance(state, ByRow) else None
        if touched is not None and numbers[touched] is not None:
            return call.mix(Kind.ROW_NUMBER)
        return state if not isinstance(state, Free) else Free(varies=whole(range(value.dim())))
    if len(used) == 1 and used[0][1].dim() == 1:
        return _write_along(call, value, used[0][0], used[0][1], source, adds)
    if _has_own_places(states, call, used):
        dim = next(d for (d, n), s in zip(used, states) if isinstance(s, Free) and s.counts)
        return _agreeing(call, state, ByRow(dim=dim))
    left = [d for d, n in enumerate(numbers) if n is None]
    if isinstance(new, ByRow) and all(isinstance(s, Free) for s in states):
        from_end = source.dim() - new.dim  # a source has the picked places, then or around them the whole dimensions
        out: list[int | None] = [*left[:at], *[None] * len(shape), *left[at:]]
        found = out[-from_end] if from_end <= len(out) else None
        if found is not None:
            return _agreeing(call, state, replace(new, dim=found))
    return call.mix(Kind.REORDERED)


def _has_own_places(states: Sequence[RowState], call: RowCall, used: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Whether the places written are each row's own."""
    return any(
        isinstance(s, Free) and s.counts is not None and s.counts[1] == 1 and n.shape[s.counts[0]] == call.rows
        for s, (_, n) in zip(states, used)
    ) and any(isinstance(s, ByRow) for s in states)


def _write_along(
    call: RowCall, value: torch.Tensor, dim: int, numbers: torch.Tensor, source: torch.Tensor, adds: bool
) -> RowState:
    """Places along one dimension; the source is aligned with the value along the others."""
    state, which, new = call.tensor_state(value), call.tensor_state(numbers), call.tensor_state(source)
    if isinstance(which, Permutation) and isinstance(new, Free) and new.counts == (0, 1) and value.dim() == 1:
        return replace(which, is_inverse=not which.is_inverse)  # inverse[order] = arange(n)
    if isinstance(which, Permutation) and isinstance(new, ByRow) and new.order == which.order and not which.is_inverse:
        return _agreeing(call, state, ByRow(scale=new.scale, dim=dim, inner=which.inner // which.share))
    if isinstance(which, Free) and isinstance(new, ByRow) and new.dim != dim:
        return _agreeing(call, state, new)
    if isinstance(which, Free) and isinstance(new, ByRow) and which.counts == (0, new.inner):
        return _agreeing(call, state, replace(new, dim=dim))
    if (
        adds
        and isinstance(state, Free)
        and state.is_zero
        and isinstance(which, ByRow)
        and isinstance(new, ByRow | Free)
    ):
        return OverRows(scale=new.scale.times(PER_ROW))
    return call.mix(Kind.REORDERED)


def _agreeing(call: RowCall, state: RowState, new: ByRow) -> RowState:
    """The state of a value of which a part is now `new`."""
    if isinstance(state, ByRow) and (state.dim, state.inner, state.order) != (new.dim, new.inner, new.order):
        return call.mix(Kind.PAIRS)
    return new


def scatter(call: RowCall) -> RowState:
    """Places along one dimension by aligned numbers."""
    value, dim = call["self"], call["dim"] % max(1, call["self"].dim())
    parts: list[Operand] = [(call.state("self"), value.shape), (call.state("index"), call["index"].shape)]
    source = call.given.get("src")
    if isinstance(source, torch.Tensor):
        parts.append((call.tensor_state(source), call["index"].shape))
    along = [s for s, _ in parts[1:] if isinstance(s, ByRow) and s.dim == dim]
    if along:
        base, new = parts[0][0], parts[-1][0]
        sums = call.name == "scatter_add" and isinstance(base, Free) and base.is_zero
        mixed = nonlinear(call, *(state for state, _ in parts))
        return mixed or (OverRows(scale=new.scale.times(PER_ROW)) if sums else call.mix(Kind.REORDERED))
    if isinstance(parts[0][0], ByRow) and parts[0][0].dim == dim:
        return nonlinear(call, *(s for s, _ in parts)) or call.mix(Kind.REORDERED)
    wide = [(_open(state, dim), call["index"].shape) for state, _ in parts]
    found = combine(call, wide, call["index"].shape)
    return Free(varies=whole(range(value.dim()))) if isinstance(found, Free) else found


def _open(state: RowState, dim: int) -> RowState:
    return _drop_dim(state, dim) if isinstance(state, Free) else state


def compact(call: RowCall) -> RowState | list[RowState]:
    """The elements that are picked depend on the numbers of elements of earlier rows."""
    states = [call.tensor_state(tensor) for tensor in call.tensors()]
    are_constants = all(isinstance(state, Free) for state in states)
    return constants(call) if are_constants else nonlinear(call, *states) or call.mix(Kind.REORDERED)


def fill_places(call: RowCall) -> RowState | list[RowState]:
    """Elements in their order into the places of a mask: those of a row are the row's own where its mask has a place
    for each, which a check of each micro-batch makes sure of (`follow/filled.py`)."""
    value, mask, source = call["self"], call["mask"], call["source"]
    before = (1,) * (value.dim() - mask.dim())
    states = [call.state("self"), move_dims(call.state("mask"), [d + len(before) for d in range(mask.dim())])]
    states.append(call.state("source"))
    shapes = (value.shape, before + mask.shape, source.shape)
    rows = [state for state in states if isinstance(state, ByRow)]
    are_in_order = all(
        (state.dim, state.inner * call.rows, state.order) == (0, shape[0], None)
        for state, shape in zip(states, shapes)
        if isinstance(state, ByRow)
    )
    if (len(rows) < 3 and not (len(rows) == 2 and isinstance(states[0], Free))) or not are_in_order:
        return compact(call)
    if len({state.scale.power for state in rows}) > 1:
        return call.mix(Kind.UNEVEN)
    scale = replace(rows[0].scale, unsure=any(state.scale.unsure for state in rows))
    return ByRow(scale=scale, inner=value.shape[0] // call.rows)


def write_part(call: RowCall) -> RowState:
    source, state, value = call.state("src"), call.state("self"), call["self"]
    names = ("dim1", "dim2") if call.name == "diagonal_scatter" else ("dim",)
    cut = {call[name] % value.dim() for name in names}
    if call.name == "diagonal_scatter" and isinstance(source, ByRow) and source.dim == call["src"].dim() - 1:
        return call.mix(Kind.ROW_NUMBER)
    if call.name != "slice_scatter":
        source = move_dims(source, [*(d for d in range(value.dim()) if d not in cut), *[None] * (len(cut) - 1)])
    elif all(call["src"].shape[d] == value.shape[d] for d in cut):
        cut = set()
    if any(isinstance(s, Mixed) for s in (source, state)):
        return Mixed()
    if not isinstance(source, ByRow | Free) or not isinstance(state, ByRow | Free):
        return call.mix(Kind.REUSED)
    for rows, other in ((state, source), (source, state)):
        if not isinstance(rows, ByRow):
            continue
        if rows.dim in cut:
            return call.mix(Kind.ROW_NUMBER)
        if isinstance(other, Free) and differs(other, rows.dim, rows.inner, call.rows):
            call.watcher.note(Kind.ROW_NUMBER)
    if isinstance(source, ByRow):
        return _agreeing(call, state, source)
    return state if isinstance(state, ByRow) else Free(varies=whole(range(value.dim())))


def triangle(call: RowCall) -> RowState:
    value, state = call["self"], call.state("self")
    last = {value.dim() - 1, value.dim() - 2}
    if isinstance(state, ByRow) and state.dim in last:
        call.watcher.note(Kind.ROW_NUMBER)
    return Free(varies=state.varies | whole(last)) if isinstance(state, Free) else state


record("gather", rows=gather, elements=Elements.PICKED, workspace=nothing)
record("index_select", rows=index_select, elements=Elements.PICKED, workspace=nothing)
record("index", rows=index, elements=Elements.PICKED, workspace=nothing)
record("_unsafe_index", rows=index, elements=Elements.PICKED)
record("index_put", "_index_put_impl", "_unsafe_index_put", rows=put, workspace=workspace_indexing.index_put)
record("index_add", "index_copy", rows=put_along, workspace=nothing)
record("index_fill", "index_reduce", rows=put_along)
record("take", rows=take)
record("scatter", "scatter_add", "scatter_reduce", rows=scatter, workspace=nothing)
record("masked_scatter", rows=fill_places, workspace=workspace_scans.masked_scatter)
record("masked_select", "nonzero", "_unique2", "unique_consecutive", "unique_dim", rows=compact)
record("penstock::linear_sum_assignment", rows=compact, workspace=nothing)
record("slice_scatter", "select_scatter", "diagonal_scatter", rows=write_part)
record("triu", "tril", rows=triangle, workspace=nothing)
