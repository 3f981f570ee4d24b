"""Records of products of matrices and what is made of them: attention, convolution, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .kernels import cpu_attention, one_product
from .pointwise import spread
from .record import RowCall, nonlinear, nothing, plain, record
from .reductions import PER_ROW
from .states import ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Stretch, differs, whole
from .workspace import indexing as workspace_indexing
from .workspace import layers as workspace_layers


def contract(call: RowCall, first: str, second: str, out: str, left: RowState, right: RowState) -> RowState:
    """The state of a product with these labels of dimensions, as in einsum; labels not in `out` are summed."""
    states = (left, right)
    if any(isinstance(state, Mixed) for state in states):
        return Mixed()
    if any(isinstance(state, Permutation) for state in states):
        return call.mix(Kind.ACROSS)
    scale = left.scale.times(right.scale)
    if any(isinstance(state, OverRows) for state in states):
        if all(isinstance(state, OverRows | Free) for state in states):
            both = all(isinstance(state, OverRows) for state in states)
            return call.mix(Kind.NONLINEAR) if both else OverRows(scale=scale)
        return call.mix(Kind.REUSED)
    rows = [(s, labels[s.dim]) for s, labels in zip(states, (first, second)) if isinstance(s, ByRow)]
    if not rows:
        return Free(scale=scale, varies=_free_varies(first, second, out, states))
    row, label = rows[0]
    if len(rows) == 2 and (rows[1][1], rows[1][0].inner, rows[1][0].order) != (label, row.inner, row.order):
        return call.mix(Kind.PAIRS)
    for state, labels in zip(states, (first, second)):
        if isinstance(state, Free) and label in labels and differs(state, labels.index(label), row.inner, call.rows):
            call.watcher.note(Kind.ROW_NUMBER)
    if label not in out:
        return OverRows(scale=scale.times(PER_ROW))
    return ByRow(scale=scale, dim=out.index(label), inner=row.inner, order=row.order)


def _free_varies(first: str, second: str, out: str, states: Sequence[RowState]) -> frozenset[Stretch]:
    spans = {(label[d], low, high) for s, label in zip(states, (first, second)) if isinstance(s, Free)
             for d, low, high in s.varies}  # fmt: skip
    return frozenset((out.index(label), low, high) for label, low, high in spans if label in out)


def product(call: RowCall, first: str, second: str) -> RowState:
    """A product of two matrices, or two batches of such."""
    a, b = call[first], call[second]
    labels = {
        (1, 1): ("k", "k", ""),
        (2, 1): ("nk", "k", "n"),
        (2, 2): ("nk", "km", "nm"),
        (3, 3): ("bnk", "bkm", "bnm"),
    }
    x, y, out = labels[a.dim(), b.dim()]
    return contract(call, x, y, out, call.tensor_state(a), call.tensor_state(b))


def matrices(call: RowCall) -> RowState:
    names = list(call.given)
    return product(call, names[0], names[1])


def added_product(call: RowCall) -> RowState:
    names = list(call.given)
    if call.name in ("addbmm", "addr"):
        return nonlinear(call, *map(call.tensor_state, call.tensors())) or call.mix(Kind.UNKNOWN)
    found, value = product(call, names[1], names[2]), call["self"]
    offset = call.tensor_state(value)
    if call.given.get("beta") == 0 or isinstance(found, Mixed):
        return found
    return _with_offset(call, found, offset, value.shape)


def _with_offset(call: RowCall, found: RowState, offset: RowState, shape: Sequence[int]) -> RowState:
    out = call.results()[0].shape
    if isinstance(offset, Mixed) or isinstance(found, Mixed):
        return Mixed()
    if isinstance(offset, OverRows) or isinstance(found, OverRows):
        same = (
            found.scale.power == offset.scale.power and not isinstance(found, ByRow) and not isinstance(offset, ByRow)
        )
        return OverRows(scale=found.scale) if same else call.mix(Kind.UNEVEN)
    spread_out = spread(call, offset, shape, out)
    if isinstance(found, ByRow):
        if isinstance(spread_out, ByRow):
            same = (spread_out.dim, spread_out.inner) == (found.dim, found.inner)
            return found if same else call.mix(Kind.PAIRS)
        if isinstance(spread_out, Free) and differs(spread_out, found.dim, found.inner, call.rows):
            call.watcher.note(Kind.ROW_NUMBER)
        return found
    if isinstance(spread_out, Free) and isinstance(found, Free):
        return replace(found, varies=found.varies | spread_out.varies)
    return spread_out


def attention(call: RowCall) -> RowState:
    """Queries meet keys of the same row and head, or of the head that serves theirs; rows are along the dimensions
    before the last two."""
    parts = [(call.state(name), call[name]) for name in ("query", "key", "value")]
    for name in ("attn_mask", "attn_bias"):
        if call.given.get(name) is not None:
            parts.append((call.state(name), call[name]))
    mixed = nonlinear(call, *(state for state, _ in parts))
    if mixed is not None:
        return mixed
    count = call["query"].dim()
    rows: set[tuple[int, int, int | None]] = set()
    varies: set[Stretch] = set()
    for state, value in parts:
        shift = count - value.dim()
        if isinstance(state, ByRow):
            served = call["query"].shape[state.dim + shift] // value.shape[state.dim]  # heads of queries by one of keys
            rows.add((state.dim + shift, state.inner * max(1, served), state.order))
        elif isinstance(state, Free):
            varies |= {(d + shift, low, high) for d, low, high in state.varies}
    if not rows:
        return Free(varies=whole(range(count)))
    dim, inner, order = next(iter(rows))
    if len(rows) > 1 or dim >= count - 2:
        return call.mix(Kind.PAIRS)
    if differs(Free(varies=frozenset(varies)), dim, inner, call.rows):
        call.watcher.note(Kind.ROW_NUMBER)
    return ByRow(dim=dim, inner=inner, order=order)


def convolution(call: RowCall) -> RowState:
    state, weight = call.state("input"), call.state("weight")
    mixed = nonlinear(call, weight) if not isinstance(weight, Free) else None
    if mixed is not None:
        return mixed
    if isinstance(weight, ByRow) and isinstance(state, ByRow):
        return call.mix(Kind.PAIRS)
    if isinstance(state, ByRow) and state.dim != 0:
        return call.mix(Kind.ACROSS)
    if isinstance(state, OverRows):
        return state if call["bias"] is None else call.mix(Kind.UNEVEN)
    if isinstance(weight, ByRow):
        return call.mix(Kind.UNKNOWN)
    return nonlinear(call, state) or (
        Free(varies=whole(range(call["input"].dim()))) if isinstance(state, Free) else state
    )


def embedding(call: RowCall) -> RowState:
    """Rows of a table by their numbers."""
    table, numbers = call.state("weight"), call.state("indices")
    mixed = nonlinear(call, numbers)
    if mixed is not None or isinstance(table, Mixed):
        return mixed or Mixed()
    if isinstance(table, ByRow) and table.dim == 1 and isinstance(numbers, Free):  # whole columns of the table
        return replace(table, dim=call["indices"].dim())
    if isinstance(table, ByRow):
        return call.mix(Kind.REORDERED)
    if isinstance(table, OverRows):
        return table if isinstance(numbers, Free) else call.mix(Kind.REUSED)
    if isinstance(numbers, Free):
        return Free(varies=numbers.varies | whole({call["indices"].dim()}))
    return plain(numbers)


def embedding_bag(call: RowCall) -> RowState:
    """Bags are found by offsets into all numbers, so that rows are where the offsets say."""
    states = [call.tensor_state(tensor) for tensor in call.tensors()]
    if all(isinstance(state, Free) for state in states):
        return Free(varies=whole({0, 1}))
    offsets, numbers = call.state("offsets"), call.state("indices")
    if isinstance(offsets, Free) and isinstance(numbers, ByRow) and offsets.counts == (0, numbers.inner):
        return ByRow(dim=0)
    return nonlinear(call, *states) or call.mix(Kind.UNKNOWN)


def grouped_product(call: RowCall) -> RowState:
    """Runs of places with a matrix each; `offs` counts the places of each run."""
    state, weight = call.state("self"), call.state("mat2")
    if not isinstance(weight, Free) or isinstance(state, Mixed):
        return nonlinear(call, state, weight) or call.mix(Kind.PAIRS)
    offsets = call.state("offs") if call.given.get("offs") is not None else Free()
    if isinstance(state, ByRow) and isinstance(offsets, OverRows | Free) and call["self"].dim() == 2 and state.dim == 0:
        return plain(state)
    return nonlinear(call, state, offsets) or (state if isinstance(state, Free) else call.mix(Kind.UNKNOWN))


record("mm", "bmm", rows=matrices, workspace=workspace_layers.product, kernel=one_product)
record("mv", "vdot", rows=matrices)
record("dot", rows=matrices, workspace=nothing)
record("addmm", "baddbmm", rows=added_product, workspace=workspace_layers.product, kernel=one_product)
record("addbmm", "addmv", "addr", rows=added_product)
record(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps", rows=attention,
)  # fmt: skip
record("_scaled_dot_product_flash_attention_for_cpu", rows=attention, kernel=cpu_attention)
record("_scaled_dot_product_flash_attention_for_cpu_backward", kernel=cpu_attention)
record("convolution", "_convolution", rows=convolution, workspace=workspace_layers.convolution)
record("mkldnn_convolution", "convolution_overrideable", rows=convolution)
record("embedding", rows=embedding, workspace=nothing)
record("_embedding_bag", "_embedding_bag_forward_only", rows=embedding_bag)
record("_grouped_mm", "_scaled_grouped_mm", rows=grouped_product)
record("embedding_dense_backward", workspace=workspace_indexing.embedding)
record("cudnn_convolution", workspace=workspace_layers.convolution)
record("convolution_backward", workspace=workspace_layers.convolution_backward)
