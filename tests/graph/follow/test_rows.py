"""Rows that meet, and losses that are a mean or a sum: against names, and against numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.loss import capture
from penstock.graph.follow.coupling import coupling_text
from penstock.graph.follow.rows import RowFacts, row_facts
from penstock.graph.operators.states import Kind
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import CaptureError
from penstock.tests.graph.follow.losses import COUPLED, MEANS, SUMS, WithHead, batch_of, loss_of, model_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

ROWS = 4


def facts_of(
    model: nn.Module, batch: dict[str, Any], count: int = 1, traced: list[int] | None = None, is_whole: bool = False
) -> RowFacts:
    """The facts, from a graph of `count` micro-batches and what else it takes (noted in `traced`)."""
    size = next(value for value in batch.values() if isinstance(value, Tensor)).shape[0]

    @functools.cache
    def graph(num_micro_batches: int) -> OpGraph:
        if traced is not None:
            traced.append(num_micro_batches)
        return capture(model, micro_batch_spec(batch, num_micro_batches))

    return row_facts(graph, count, size, is_whole=is_whole)


@pytest.mark.parametrize("count", slow_but([4], [1, 2, 4]))
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_rows(name: str, count: int) -> None:
    assert facts_of(model_of(MEANS[name]), batch_of(ROWS), count) == RowFacts()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_rows(name: str, count: int) -> None:
    assert facts_of(model_of(SUMS[name]), batch_of(ROWS), count) == RowFacts(power=1)


@pytest.mark.parametrize("count", slow_but([4], [1, 2, 4]))
@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_meet(name: str, count: int) -> None:
    try:
        found = facts_of(model_of(COUPLED[name]), batch_of(ROWS), count)
    except CaptureError:  # a norm, two hardest rows or two halves of one row
        assert count == ROWS
        return
    assert found.couplings
    assert all("losses.py:" in coupling.source for coupling in found.couplings)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("in-batch negatives", Kind.PAIRS),
        ("triplets of rows", Kind.REORDERED),
        ("halves", Kind.REORDERED),
        ("dino", Kind.REUSED),
        ("variance", Kind.ACROSS),
        ("root of a mean", Kind.NONLINEAR),
        ("balanced experts", Kind.NONLINEAR),
        ("dice", Kind.RATIO),
        ("sum and decay", Kind.UNEVEN),
        ("number of a row", Kind.ROW_NUMBER),
        ("batch norm", Kind.BATCH_NORM),
        ("gradient by the norm of all", Kind.GRADIENT),
        ("gradient by how often a row of a table is read", Kind.GRADIENT),
    ],
)
def test_how_rows_meet(name: str, kind: Kind) -> None:
    (coupling,) = facts_of(model_of(COUPLED[name]), batch_of(ROWS)).couplings
    assert coupling.kind is kind


def test_a_mean_over_what_the_whole_batch_counts_is_one_over_rows() -> None:
    def mask_attention(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        mask = (y > 3).float()
        return (F.cross_entropy(h, y, reduction="none") * mask).sum() / mask.sum()

    def ignoring(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, y, ignore_index=3)

    for loss in (mask_attention, ignoring):
        for count in (1, 2):
            assert facts_of(model_of(loss), batch_of(ROWS), count) == RowFacts()


def test_a_mean_over_what_only_the_forward_knows_couples_rows() -> None:
    def by_own_classes(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, h.detach().argmax(-1), ignore_index=3)

    (coupling,) = facts_of(model_of(by_own_classes), batch_of(ROWS)).couplings
    assert coupling.kind is Kind.COUNT


NORMS = 13  # of the wide ResNet
LOOSE = sorted(set(zoo()) - {"wide_resnet", "in_place"})


@pytest.mark.parametrize("name", slow_but(("lstm", "custom_function"), LOOSE))
def test_models_whose_rows_never_meet(name: str) -> None:
    """Also from one micro-batch of one row, without another trace for most."""
    model, batch = zoo()[name]()
    assert facts_of(model, batch) == RowFacts()
    assert facts_of(model, batch, 2) == RowFacts()


@pytest.mark.slow
def test_models_whose_rows_meet() -> None:
    model, batch = zoo()["wide_resnet"]()
    found = facts_of(model, batch).couplings
    assert [coupling.kind for coupling in found] == [Kind.BATCH_NORM] * NORMS
    assert found[0].module == "body.blocks.0.bn1 (BatchNorm2d)"
    model, batch = zoo()["in_place"]()  # it subtracts a running mean that it has just updated
    facts = facts_of(model, batch)
    reused, updated = facts.couplings
    assert reused.kind is Kind.REUSED and reused.source.endswith("return self.second(h - self.mean)")
    assert (updated.kind, updated.operator) == (Kind.BUFFER, "body.mean")
    assert coupling_text(updated).startswith("forward updates the buffer body.mean, once for each micro-batch at ")
    assert facts.repeated_buffers == ("body.calls",)  # no row influences how often forward was called


def test_a_batch_norm_that_is_frozen_mixes_nothing() -> None:
    """Once the capture keeps a module's own mode; here the functional form with the statistics that it has."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            norm = self.norm
            h = F.batch_norm(self.layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, training=False)
            return F.cross_entropy(h, y)

    assert facts_of(Frozen(), batch_of(ROWS)) == RowFacts()


def test_what_does_not_reach_the_loss_does_not_count() -> None:
    def loss(model: WithHead, h: Tensor, y: Tensor) -> Any:
        return {"loss": F.cross_entropy(h, y), "similar": h @ h.t(), "share": (h.argmax(-1) == y).float().mean().sqrt()}

    assert facts_of(model_of(loss), batch_of(ROWS)) == RowFacts()


def test_a_batch_of_one_row_has_nothing_to_couple() -> None:
    traced: list[int] = []
    assert facts_of(model_of(COUPLED["dino"]), batch_of(1), traced=traced) == RowFacts()
    assert not traced


def test_a_batch_that_is_never_cut_is_traced_again_only_where_one_graph_leaves_something_open() -> None:
    for name, count, is_whole, expected in (
        ("mean", 1, True, [1]),
        ("mean", 1, False, [1, 2]),
        ("mean", 4, False, [4, 2, 1]),
        ("sum by a constant", 1, True, [1, 2]),
    ):
        traced: list[int] = []
        facts_of(model_of({**MEANS, **SUMS}[name]), batch_of(ROWS), count, traced, is_whole)
        assert traced == expected, name


Loop = Callable[[WithHead, Tensor, Tensor], list[Tensor]]
ALIKE: dict[str, Loop] = {
    "weights": lambda model, h, y: [row * model.layer.weight[0] for row in h],
    "made anew": lambda model, h, y: [row * torch.full((8,), 2.0, dtype=row.dtype) for row in h],
    "two values": lambda model, h, y: [a * b for a, b in zip(h, h.tanh())],
    "pieces": lambda model, h, y: [torch.cat((row[:, :4].tanh(), row[:, 4:]), 1) for row in h.split(1)],
}
BY_NUMBER: dict[str, Loop] = {
    "weights": lambda model, h, y: [row * model.layer.weight[i] for i, row in enumerate(h)],
    "first row": lambda model, h, y: [row if i else row.tanh() for i, row in enumerate(h.split(1))],
    "shifted": lambda model, h, y: [row.roll(i) * model.layer.weight[0] for i, row in enumerate(h)],
    "other values": lambda model, h, y: [(h.tanh() if i else h)[i] for i in range(len(h))],
    "other pieces": lambda model, h, y: [h.view(-1, 4)[2 * i + (i == 0)] for i in range(len(h))],
    "counted": lambda model, h, y: [row * sum([torch.ones(8)] * i, torch.ones(8)) for i, row in enumerate(h)],
}


def _model_with(loop: Loop) -> Any:
    def loss(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return torch.stack(loop(model, h, y)).square().mean()

    return model_of(loss)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ALIKE)
def test_a_loop_over_rows_that_computes_each_alike(name: str, count: int) -> None:
    assert facts_of(_model_with(ALIKE[name]), batch_of(ROWS), count) == RowFacts()
    assert agrees(_model_with(ALIKE[name]), batch_of(ROWS), 0)


def test_a_list_with_a_number_for_each_row() -> None:
    def split(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return torch.cat(h.split([1] * len(h))).square().mean()

    assert facts_of(model_of(split), batch_of(ROWS), 2) == RowFacts()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_a_loop_that_computes_a_row_by_its_number(name: str, count: int) -> None:
    (coupling,) = facts_of(_model_with(BY_NUMBER[name]), batch_of(ROWS), count).couplings
    assert coupling.kind is Kind.ROW_NUMBER
    assert not agrees(_model_with(BY_NUMBER[name]), batch_of(ROWS), 0)


OF_ALL: dict[str, Callable[[Tensor], Tensor]] = {  # what is done to all rows of the batch, and to no fewer
    "other call": torch.relu,
    "more calls": lambda h: (h.tanh().cos() + 1).sigmoid(),
    "number": lambda h: h * 3,
}


@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
@pytest.mark.parametrize("name", OF_ALL)
def test_what_one_number_of_rows_alone_is_computed_by(name: str, rows: int) -> None:
    """Of the whole batch, or of each of two micro-batches: all others are alike."""

    def loss(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return (OF_ALL[name](h) if len(h) == rows else h).square().mean()

    def pick(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
        return (h * (3 if len(h) == rows else 1)).square().mean()

    for each in (loss, pick):
        for count in (2, ROWS) if rows == ROWS else (2,):
            found = facts_of(model_of(each), batch_of(ROWS), count)
            assert {coupling.kind for coupling in found.couplings} == {Kind.ROW_COUNT}


# --- numbers

Step = Callable[[Tensor, Tensor], Tensor]
STEPS: dict[str, Step] = {
    "tanh": lambda h, w: torch.tanh(h),
    "product": lambda h, w: h @ w,
    "turned": lambda h, w: (w.t() @ h.t()).t(),
    "softmax": lambda h, w: h.softmax(-1),
    "layer norm": lambda h, w: F.layer_norm(h, (8,)),
    "group norm": lambda h, w: F.group_norm(h, 2),
    "split": lambda h, w: torch.cat([p * q for p, q in [h.view(-1, 2, 4).unbind(1)]] * 2, dim=1),
    "flat": lambda h, w: h.flatten().view(-1, 4).sin().view(-1, 8),
    "sequence first": lambda h, w: (
        h.view(-1, 4, 2).transpose(0, 1).reshape(-1, 2).cos().view(4, -1, 2).mT.mT.transpose(0, 1).flatten(1)
    ),
    "attention": lambda h, w: F.scaled_dot_product_attention(*[h.view(-1, 4, 2) @ w[:2, :2]] * 3).flatten(1),
    "sorted": lambda h, w: h.sort(-1).values,
    "row sum": lambda h, w: h * h.sum(-1, keepdim=True),
    "repeat": lambda h, w: h.repeat(1, 2)[:, 4:12],
    "einsum": lambda h, w: torch.einsum("bi,ij->bj", h, w),
    "clamped": lambda h, w: h.clamp(min=0.1),
    "row of weights": lambda h, w: h * w[:1],
    "doubled rows": lambda h, w: torch.cat([h, h.exp()]).tanh().chunk(2)[1],
    "row by row": lambda h, w: torch.cat([(row @ w).relu() + 0.1 for row in h.split(1)]),
    "rows stacked": lambda h, w: torch.stack([row.softmax(-1) * row for row in h]),
    # what mixes
    "a row for all": lambda h, w: h + h[0],
    "rows exchanged": lambda h, w: torch.cat([h[1:2], h[:1], h[2:]]),
    "shares of rows": lambda h, w: torch.cat([row / len(h) for row in h.split(1)]),
    "softmax over rows": lambda h, w: h.softmax(0),
    "centred": lambda h, w: h - h.mean(0, keepdim=True),
    "shifted": lambda h, w: h.roll(1, 0),
    "similar": lambda h, w: (h @ h.t()) @ h,
    "summed so far": lambda h, w: h.cumsum(0),
    "flat softmax": lambda h, w: h.flatten().softmax(0).view(-1, 8),
    "wrong flat": lambda h, w: h.t().reshape(-1, 8),
    "attention over rows": lambda h, w: F.scaled_dot_product_attention(*[h[None]] * 3)[0],
    "largest": lambda h, w: h / h.amax(),
    "second batch norm": lambda h, w: F.batch_norm(h, None, None, training=True),
}
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.square().mean(),
    "sum": lambda h: h.square().sum(),
    "mean of sums": lambda h: h.sin().sum(-1).mean(),
    "sum by rows": lambda h: h.cos().sum() / len(h),
    "logsumexp": lambda h: h.logsumexp(-1).mean(),
    "root": lambda h: h.square().mean().sqrt(),
}


class Chain(nn.Module):
    """Steps one after another."""

    def __init__(self, steps: list[str], end: str):
        super().__init__()
        self.steps, self.end = steps, end
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.0 * self.weight.sum()
        for step in self.steps:
            h = STEPS[step](h, self.weight)
        return ENDS[self.end](h)


def agrees(model: nn.Module, batch: dict[str, Any], power: int, parts: int = 2) -> bool:
    """Whether the losses of parts of a batch average to that of the whole, times parts ** power; gradients too, where
    each backward begins with the share of a part, as in programs."""

    def run(some: dict[str, Any], share: float = 1.0) -> list[Tensor]:
        copied = copy.deepcopy(model).double()
        some = {k: v.double() if v.is_floating_point() else v for k, v in some.items()}
        loss = loss_of(copied, some) * share
        loss.backward()
        return [loss.detach(), *(p.grad for p in copied.parameters() if p.grad is not None)]

    whole = run(batch)
    cut = {name: value.chunk(parts) for name, value in batch.items()}
    split = [run({name: pieces[i] for name, pieces in cut.items()}, parts ** (power - 1)) for i in range(parts)]
    together = [torch.stack(found).sum(0) for found in zip(*split, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(whole, together, strict=True))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.sampled_from(sorted(ENDS)), st.sampled_from([1, 2]))
@example(["sequence first", "attention"], "mean", 1)
@example(["wrong flat", "flat"], "sum", 2)
@example(["row of weights"], "mean", 2)
def test_the_verdict_is_that_of_numbers(steps: list[str], end: str, count: int) -> None:
    """What is said not to mix has parts whose losses and gradients make those of the whole. What is said to mix may do
    so in a way that cancels, as a shift of rows does before a mean."""
    model = Chain(steps, end)
    batch = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).abs() + 0.1}
    found = facts_of(model, batch, count)
    if not found.couplings:
        assert agrees(model, batch, found.power)
    first = list(STEPS)[: list(STEPS).index("a row for all")]
    if all(step in first for step in steps) and end != "root":
        assert not found.couplings


@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_named_losses_are_what_numbers_say(name: str) -> None:
    power = int(name in SUMS)
    assert agrees(model_of({**MEANS, **SUMS}[name]), batch_of(ROWS), power)


@pytest.mark.parametrize("name", COUPLED)
def test_named_losses_that_couple_differ_in_numbers(name: str) -> None:
    assert not agrees(model_of(COUPLED[name]), batch_of(ROWS), 0)
