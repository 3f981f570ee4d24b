"""Records of products of matrices and what is made of them: attention, convolution, embedding, and of functions of
matrices, of which a tensor may hold several: torch.linalg."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from .kernels import cpu_attention, one_product, scaled_product
from .pointwise import Operand, same_scale, spread, together
from .record import RowCall, RowRule, constants, nonlinear, nothing, plain, record
from .reductions import PER_ROW, drop_dims
from .states import ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale, Stretch, differs, whole
from .views import move_dims
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
    labels = {"addbmm": ("bnk", "bkm", "nm"), "addr": ("n", "m", "nm")}.get(call.name)
    states = call.state(names[1]), call.state(names[2])
    found = contract(call, *labels, *states) if labels is not None else product(call, names[1], names[2])
    value = call["self"]
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
    spread_out, is_zero = spread(call, offset, shape, out), isinstance(offset, Free) and offset.is_zero
    found = replace(found, scale=same_scale(call, [found.scale] if is_zero else [found.scale, offset.scale], 1))
    if isinstance(found, ByRow):
        if isinstance(spread_out, ByRow):
            same = (spread_out.dim, spread_out.inner) == (found.dim, found.inner)
            return found if same else call.mix(Kind.PAIRS)
        if isinstance(spread_out, Free) and differs(spread_out, found.dim, found.inner, call.rows):
            call.watcher.note(Kind.ROW_NUMBER)
        return found
    if isinstance(spread_out, Free) and isinstance(found, Free):
        return replace(found, varies=found.varies | spread_out.varies)
    return replace(spread_out, scale=found.scale)


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
        is_output = weight.dim == int(call["transposed"]) and call["groups"] == 1 and call["bias"] is None
        return replace(weight, dim=1) if is_output and isinstance(state, Free) else call.mix(Kind.ACROSS)
    found = nonlinear(call, state) or (
        Free(varies=whole(range(call["input"].dim()))) if isinstance(state, Free) else state
    )
    scales = [state.scale.times(weight.scale), *([] if call["bias"] is None else [call.state("bias").scale])]
    return replace(found, scale=same_scale(call, scales, 1))


def embedding(call: RowCall) -> RowState:
    """Rows of a table by their numbers."""
    table, numbers = call.state("weight"), call.state("indices")
    if call["scale_grad_by_freq"]:
        return call.mix(Kind.GRADIENT)
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
    if call["scale_grad_by_freq"]:
        return call.mix(Kind.GRADIENT)
    if isinstance(offsets, Free) and isinstance(numbers, ByRow) and offsets.counts == (0, numbers.inner):
        return ByRow(dim=0)
    return nonlinear(call, *states) or call.mix(Kind.UNKNOWN)


def bilinear(call: RowCall) -> RowState:
    """The product of three values, each with dimensions of one place put in, summed over dimensions."""
    shapes, parts = [], list[Operand]()
    for number in "123":
        state, shape = call.state("i" + number), list(call["i" + number].shape)
        for dim in sorted(call["expand" + number]):
            shape.insert(dim, 1)
        kept = [dim for dim in range(len(shape)) if dim not in call["expand" + number]]
        parts.append((move_dims(state, kept), shape))
        shapes.append(shape)
    mixed = nonlinear(call, *(state for state, _ in parts))
    if mixed is not None:
        return mixed
    whole_shape = torch.broadcast_shapes(*shapes)
    found, summed = together(call, parts, whole_shape), set(call["sumdim"])
    scale = functools.reduce(Scale.times, (state.scale for state, _ in parts))
    if isinstance(found, ByRow) and found.dim in summed:
        return OverRows(scale=scale.times(PER_ROW))
    return replace(drop_dims(found, torch.empty(whole_shape, device="meta"), summed, keep=False), scale=scale)


def grouped_product(call: RowCall) -> RowState:
    """Runs of places with a matrix each; `offs` counts the places of each run."""
    state, weight = call.state("self"), call.state("mat2")
    if not isinstance(weight, Free) or isinstance(state, Mixed):
        return nonlinear(call, state, weight) or call.mix(Kind.PAIRS)
    offsets = call.state("offs") if call.given.get("offs") is not None else Free()
    if isinstance(state, ByRow) and isinstance(offsets, OverRows | Free) and call["self"].dim() == 2 and state.dim == 0:
        return plain(state)
    return nonlinear(call, state, offsets) or (state if isinstance(state, Free) else call.mix(Kind.UNKNOWN))


def matrix_rule(*own: int, columns: int | None = None) -> RowRule:
    """The rule of a function of each of several matrices: its tensor operands have these numbers of dimensions of their
    own, the last ones, and the others tell matrices apart. `columns`: the operand whose columns the function takes
    apart from each other, as the right sides of equations."""

    def rule(call: RowCall) -> RowState | list[RowState]:
        values = list(call.tensors())
        side = values[columns] if columns is not None and own[columns] == 2 else None
        if side is not None and all(isinstance(call.tensor_state(v), Free) for v in values if v is not side):
            state, place = plain(call.tensor_state(side)), -1 if call.given.get("left", True) else -2
            if isinstance(state, ByRow) and state.dim == side.dim() + place:
                return [replace(state, dim=call.results()[0].dim() + place), *constants(call)[1:]]
        return batch_state(call, values, own)

    return rule


def batch_state(call: RowCall, values: Sequence[torch.Tensor], own: Sequence[int]) -> RowState | list[RowState]:
    """The state of results whose first dimensions are those of the operands, without the last `own` of each."""
    states = [call.tensor_state(value) for value in values]
    mixed = nonlinear(call, *states)
    if mixed is not None:
        return mixed
    parts: list[Operand] = []
    for value, state, count in zip(values, states, own):
        first = value.dim() - count
        if isinstance(state, ByRow) and state.dim >= first:
            return call.mix(Kind.ACROSS)
        if isinstance(state, Free):
            state = Free(varies=frozenset(span for span in state.varies if span[0] < first))
        parts.append((state, value.shape[:first]))
    found = plain(together(call, parts, torch.broadcast_shapes(*(shape for _, shape in parts))))
    return constants(call) if isinstance(found, Free) else found


def solve(call: RowCall) -> RowState | list[RowState]:
    """Equations whose right side is a matrix, or a vector for each matrix."""
    matrix, right = call["A"], call["B"]
    is_vector = right.dim() == 1 or right.shape == matrix.shape[:-1]
    return matrix_rule(2, 1 if is_vector else 2, columns=1)(call)


def segments(call: RowCall) -> RowState | list[RowState]:
    """Sums and the like of runs along a dimension, whose lengths or offsets may differ along those before it."""
    values = list(call.tensors())
    return batch_state(call, values, [call["data"].dim() - call["axis"], 1])


record("mm", "bmm", rows=matrices, workspace=workspace_layers.product, kernel=one_product)
# cuBLAS has one workspace for all products; a rowwise kernel of CUTLASS takes none worth counting.
record("_scaled_mm", workspace=nothing, kernel=scaled_product)
record("mv", "vdot", "_int_mm", rows=matrices)
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
record("_trilinear", rows=bilinear)
record("_grouped_mm", "_scaled_grouped_mm", rows=grouped_product)
record("embedding_dense_backward", workspace=workspace_indexing.embedding)
record("cudnn_convolution", workspace=workspace_layers.convolution)
record("convolution_backward", workspace=workspace_layers.convolution_backward)
record(
    "_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_cholesky_ex", "cholesky", "cholesky_inverse",
    "_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_qr", "geqrf", "linalg_lu",
    "linalg_lu_factor_ex", "linalg_ldl_factor_ex", "linalg_matrix_exp", rows=matrix_rule(2),
)  # fmt: skip
record("linalg_pinv", rows=matrix_rule(2, 0, 0))
record("linalg_householder_product", "lu_unpack", rows=matrix_rule(2, 1))
record("linalg_lstsq", rows=matrix_rule(2, 2))
record("linalg_solve_triangular", rows=matrix_rule(2, 2, columns=1))
record("cholesky_solve", "triangular_solve", rows=matrix_rule(2, 2, columns=0))
record("linalg_lu_solve", "linalg_ldl_solve", "ormqr", rows=matrix_rule(2, 1, 2, columns=2))
record("_linalg_solve_ex", rows=solve)
record("segment_reduce", rows=segments)
