"""Halves of the rows give what the whole gives, operator by operator, exactly where its rows rule says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.loss import capture
from penstock.graph.follow.rows import RowFacts, row_facts
from penstock.graph.operators.pointwise import elementwise
from penstock.graph.operators.record import RowCall, is_pointwise, operator_name, operator_of
from penstock.graph.operators.states import ByRow, Kind, OverRows, RowState
from penstock.graph.opgraph import value_tensors
from penstock.tests.graph.operators.samples import Call, Rows, recorded_calls

# They read past the end of operands that do not fit each other.
UNSAFE = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "native_group_norm",
          "native_layer_norm", "segment_reduce", "_ctc_loss", "lu_unpack")  # fmt: skip
# torch's own code alone calls them: FSDP, and decompositions of `interpolate`.
ARBITRARY = ("_linalg_svd",)  # singular vectors of equal singular values are any
INTERNAL = ("_chunk_cat", "_unsafe_masked_index", "_linalg_check_errors")


@dataclass(frozen=True)
class Trial:
    """A call on the rows of two calls, and the results of these. `states`: what the operator's rule says of the results
    of the whole; None where it has no rule."""

    text: str
    rows: int
    states: list[RowState] | None
    met: list[Kind]
    whole: list[Tensor]
    halves: list[tuple[Tensor, Tensor]]


def trials(call: Call) -> Iterator[Trial]:
    """The operator with some of its tensors twice as long along a dimension, for each dimension."""
    func, args, kwargs, out = call
    tensors, results = [*value_tensors(args), *value_tensors(kwargs)], list(value_tensors(out))
    if not results or any(t.layout is not torch.strided or not t.numel() for t in (*tensors, *results)):
        return
    for first in tensors[:3]:
        for dim in range(first.dim()):
            size = first.shape[dim]
            alike = [t for t in tensors if t.dim() == first.dim() and t.shape[dim] == size]
            from_end = [t for t in tensors if t.dim() > first.dim() and t.shape[dim - first.dim()] == size]
            choices = [{id(t): dim for t in alike}, {id(first): dim}]
            choices.append({id(t): dim - first.dim() + t.dim() for t in (first, *from_end)})
            for places in choices if size > 1 else ():
                yield from trial_of(func, args, kwargs, out, places, 2 * size)


def trial_of(func: Any, args: Any, kwargs: Any, out: Any, places: dict[int, int], rows: int) -> Iterator[Trial]:
    """The trial of a call whose tensors have rows in these places; none where it does not take operands like these."""

    def other(tensor: Tensor) -> Tensor:
        turned = tensor.flip(places[id(tensor)]) if id(tensor) in places else tensor
        return turned * 0.75 if turned is not tensor and (turned.is_floating_point() or turned.is_complex()) else turned

    watcher = Rows(rows)
    kept: list[Tensor] = []

    def both(tensor: Tensor) -> Tensor:
        if id(tensor) not in places:
            return tensor
        kept.append(torch.cat([tensor, other(tensor)], places[id(tensor)]))
        watcher.states[id(kept[-1])] = ByRow(dim=places[id(tensor)])
        return kept[-1]

    second: Any = tree_map_only(Tensor, other, (args, kwargs))
    together: Any = tree_map_only(Tensor, both, (args, kwargs))
    try:
        halves = [list(value_tensors(out)), list(value_tensors(func(*second[0], **second[1])))]
        whole = func(*together[0], **together[1])
    except (RuntimeError, IndexError, ValueError, NotImplementedError):  # of sizes that do not fit
        return
    if operator_name(func) == "masked_scatter" and not (is_filled(*args) and is_filled(*second[0])):
        return
    rule = operator_of(func).rows or (elementwise if is_pointwise(func) else None)
    found = None if rule is None else rule(RowCall(watcher, func, *together, whole))
    results = list(value_tensors(whole))
    if len(results) == len(halves[0]) == len(halves[1]) and watcher.is_clear:
        states = [found] * len(results) if isinstance(found, RowState) else found
        shapes = [tuple(t.shape) for t in (*value_tensors(together[0]), *value_tensors(together[1]))]
        text = f"{shapes}, rows in {list(places.values())}: {states} {watcher.kinds}"
        yield Trial(text, rows, states, watcher.kinds, results, list(zip(*halves)))


def is_filled(value: Tensor, mask: Tensor, source: Tensor) -> bool:
    """Whether a mask has a place for each element: programs of several micro-batches check it."""
    return int(torch.broadcast_tensors(value, mask)[1].sum()) == source.numel()


def is_close(first: Tensor, second: Tensor) -> bool:
    """Up to rounding of fp32 by decompositions of matrices."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_floating_point() or first.is_complex():
        return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(first, second)


def is_row_wise(trial: Trial) -> bool:
    """Whether each result is those of the halves one after the other along some dimension."""

    def is_joined(whole: Tensor, halves: tuple[Tensor, Tensor]) -> bool:
        shape = halves[0].shape
        along = [d for d in range(len(shape)) if (*shape[:d], 2 * shape[d], *shape[d + 1 :]) == whole.shape]
        same = halves[1].shape == shape and whole.dim() == len(shape)
        return same and any(is_close(torch.cat(halves, d), whole) for d in along)

    return all(map(is_joined, trial.whole, trial.halves))


def is_as_said(whole: Tensor, halves: tuple[Tensor, Tensor], state: RowState, rows: int) -> bool:
    """Whether a result is what its state says: of rows in a place, or the sum or the mean over rows."""
    if isinstance(state, OverRows):
        total = halves[0] + halves[1]
        return is_close(total if state.scale.power else total / 2, whole)
    assert isinstance(state, ByRow)
    if whole.shape[state.dim] % (rows * state.inner) or {half.dim() for half in halves} != {whole.dim()}:
        return False
    cut = whole.unflatten(state.dim, (-1, 2, rows // 2 * state.inner)).unbind(state.dim + 1)
    return all(is_close(part.flatten(state.dim, state.dim + 1), half) for part, half in zip(cut, halves))


def says(state: RowState) -> bool:
    """Whether a state says where rows are, or how they are added up."""
    is_total = isinstance(state, OverRows) and not state.scale.unsure and state.scale.power in (0, 1)
    return is_total or (isinstance(state, ByRow) and state.order is None)


def outcome(samples: int, calls: int) -> tuple[set[str], dict[str, str], dict[str, str]]:
    """The operators of which a rule says something that is right, a trial of each whose rule is wrong, and one of each
    without a rule that works row by row all the same."""
    right, wrong, unknown = set[str](), dict[str, str](), dict[str, str]()
    for call in recorded_calls(samples, calls):
        name, tags = operator_name(call[0]), call[0].tags
        if torch.Tag.nondeterministic_seeded in tags or "backward" in name or name in (*UNSAFE, *INTERNAL, *ARBITRARY):
            continue
        for trial in trials(call):
            if trial.states is None or Kind.UNKNOWN in trial.met:
                unknown |= {name: trial.text} if is_row_wise(trial) else {}
            elif not trial.met and says(trial.states[0]):
                results = zip(trial.whole, trial.halves, trial.states, strict=True)
                is_right = all(is_as_said(*result, trial.rows) for result in results if says(result[2]))
                right |= {name} if is_right else set()
                wrong |= {} if is_right else {name: trial.text}
    return right, wrong, unknown


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "calls", "least"), [(1, 3, 185), (12, 40, 270)])
def test_halves_of_the_rows_give_what_the_whole_gives(samples: int, calls: int, least: int) -> None:
    right, wrong, unknown = outcome(samples, calls)
    assert (wrong, unknown) == ({}, {}) and len(right) >= least


SPD = 3 * torch.eye(8)
Step = Callable[[Tensor, Tensor], Tensor]  # of hidden values (rows, 8, 8) and a weight (8, 8)
STEPS: dict[str, Step] = {
    "hardswish": lambda h, w: F.hardswish(h, inplace=True),
    "in place": lambda h, w: h.mul(1).abs_().sqrt_(),
    "slope that is trained": lambda h, w: F.prelu(h, w[0]),
    "triangular equations": lambda h, w: torch.linalg.solve_triangular(SPD + h.tril(-1) / 9, h, upper=False),
    "equations with one matrix": lambda h, w: torch.linalg.solve(SPD + w, h),
    "equations": lambda h, w: torch.linalg.solve(SPD + h / 9, h[..., 0]),
    "singular values": lambda h, w: torch.linalg.svdvals(h),
    "eigenvalues": lambda h, w: torch.linalg.eigvalsh(h + h.mT),
    "pseudo-inverse": lambda h, w: torch.linalg.pinv(h),
    "transform of features": lambda h, w: torch.fft.irfft(torch.fft.rfft(h).abs()),
    "diagonals": lambda h, w: torch.diag_embed(h) @ w,
    "diagonals written": lambda h, w: torch.diagonal_scatter(h, h[:, 0], dim1=1, dim2=2),
    "cross product": lambda h, w: torch.linalg.cross(h[..., :3], h[..., 3:6]),
    "bilinear": lambda h, w: F.bilinear(h, h, w.expand(2, 8, 8)),
    "turned": lambda h, w: h.rot90(1, (1, 2)),
    "copy of a view": lambda h, w: torch.permute_copy(h, (0, 2, 1)).exp(),
    "bags": lambda h, w: F.embedding_bag(h[:, 0].abs().long().clamp(max=7), w),
    "quantised for a test": lambda h, w: torch.fake_quantize_per_channel_affine(
        h, torch.ones(8), torch.zeros(8, dtype=torch.int32), 2, -8, 7),
}  # fmt: skip


class OneStep(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.layer = step, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.layer(x), self.layer.weight).square().mean()


@pytest.mark.parametrize("name", STEPS)
def test_a_model_keeps_its_rows_apart(name: str) -> None:
    model, batch = OneStep(STEPS[name]), {"x": torch.randn(4, 8, 8)}
    assert row_facts(lambda count: capture(model, micro_batch_spec(batch, count)), 1, 4) == RowFacts()
