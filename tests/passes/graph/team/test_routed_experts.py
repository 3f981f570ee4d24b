"""Experts of members with different tokens: equal to eager PyTorch, bytes as theory says, wrong programs caught."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import parse_program, print_program, work_of
from penstock.ir.verify import verify
from penstock.passes.decisions import TokenSplit
from penstock.passes.draft import Draft, Options
from penstock.passes.graph.opgraph import OpGraph
from penstock.passes.graph.team.split_context import SplitContext
from penstock.runtime.expert_parts import arrival_order, arrived_offsets, expert_counts
from penstock.tests.passes.graph.team.mixtures import EXPERTS, TOP, WIDTH, Mixture
from penstock.tests.passes.graph.team.sequences import (
    PLAIN,
    TOKENS,
    assert_a_team_trains_as_eager,
    batches_of,
    drafted,
    lines,
    names_of,
)

TOLERANCE = 2e-6  # products in groups are in fp32; terms of sums are added in another order
EVEN, ONE, LAST = (0.0,) * EXPERTS, (9.0, 0.0, 0.0, 0.0), (0.0, 0.0, 9.0, 8.0)
PIPELINE = PLAIN.replace("stages=1", "stages=2")
LAYOUTS = {
    "a team": (2, 2, "mesh", PLAIN),
    "a larger team": (4, 4, "mesh", PLAIN),
    "two teams": (4, 2, "mesh", PLAIN),
    "a pipeline of teams": (4, 2, "mesh{depth=2}", PIPELINE),
    "split backwards": (4, 2, "mesh{depth=2}", PIPELINE.replace("1f1b", "zero-bubble")),
    "forwards again": (2, 2, "mesh", PLAIN.replace("insert-remat", "insert-remat{always=true}")),
    "weights in DRAM": (2, 2, "mesh", PLAIN.replace("insert-fetch", "insert-fetch{swap=true}")),
    "activations in DRAM": (
        2, 2, "mesh",
        "partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline, choose-activations{swap=true}, "
        "insert-fetch{swap=true}, insert-optimizer",
    ),
}  # fmt: skip


@functools.cache
def mixture(bias: tuple[float, ...] = EVEN) -> OpGraph:
    """Shared by tests, which do not change it."""
    torch.manual_seed(3)
    return trace(Mixture(bias), batches_of(1)[0])


def test_rows_of_a_team_go_to_experts_and_back() -> None:
    graph = mixture()
    draft = drafted(graph, lines("rows", 2), 2)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert draft.programs[0].interface.sums_in_team
    assert "each has 2 of 4 experts, to which tokens go by count, in 1 layers" in draft.notes["split-context"]
    _check_bytes(draft, 2)
    _check_sums_and_micro_batches(draft)


def _check_bytes(draft: Draft, team: int) -> None:
    """A micro-batch's rows go and come once, their gradients too: (N - 1) / N of them leave the member, where experts
    have as many rows. Rows are tokens for one of their experts. Of counts, each member sends all others its own."""
    works = [(n.target, work_of(p, n)) for p in draft.programs for n in p.ops()]
    rows_bytes = 2 * TOKENS // team * TOP * WIDTH * 4
    for op in (ops.to_experts, ops.from_experts):
        assert [work.moved_bytes for target, work in works if target is op] == [rows_bytes] * 2 * 2  # micro-batches
        assert {work.pattern for target, work in works if target is op} == {ops.PAIRS}
    counts = [work.moved_bytes for target, work in works if target is ops.gather_parts]
    assert counts == [team * EXPERTS * 4] * 2


def _check_sums_and_micro_batches(draft: Draft) -> None:
    """Caught are programs without the team's sum of a router's gradients, that would add up gradients of different
    experts, and that take the counts of another micro-batch."""
    for changes, said in (
        ((("g0_team, = rt.all_reduce(g0_m1, group=\"team\", parts=False)", ""), ("g0_team", "g0_m1")),
         "the gradients of stage0, of which members of a team have different tokens, were not summed over the team"),
        ((("rt.step(\"stage1\", g1_m1)", "x, = rt.all_reduce(g1_m1, group=\"team\")\n    rt.step(\"stage1\", x)"),
          ("rt.free(g1_m1)", "rt.free(x)")),
         "gradients of parts are of different weights on each member; use parts=False"),
        ((("rt.to_experts(getitem_7_m1, gather_alike_m1,", "rt.to_experts(getitem_7_m1, gather_alike_m0,"),
          ("rt.free(gather_alike_m0, d_to_experts_m0_s1)", "rt.free(d_to_experts_m0_s1)"),
          ("rt.free(getitem_7_m1)", "rt.free(getitem_7_m1, gather_alike_m0)")),
         "`gather_alike_m0` is of micro-batch 0, the op is of micro-batch 1"),
    ):  # fmt: skip
        text = print_program(draft.programs[0])
        for old, new in changes:
            assert old in text, f"{old!r} is not in\n{text}"
            text = text.replace(old, new)
        with pytest.raises(VerifyError, match=said):
            verify([parse_program(text, draft.programs[0].interface, 0)])


CASES = [f"{by}: {layout}" for by in ("rows", "heads", "ring") for layout in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_experts_of_a_team_train_as_eager(case: str) -> None:
    by, layout = case.split(": ")
    devices, team, mesh, rest = LAYOUTS[layout]
    graph = mixture()
    if by == "rows" and team > 2:
        with pytest.raises(PassError, match="2 rows of a micro-batch cannot be shared out equally as 4 pieces; the ne"):
            drafted(graph, lines(by, team, mesh, rest), devices)
        return
    draft = drafted(graph, lines(by, team, mesh, rest), devices)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert {"to_experts", "from_experts"} <= set(names_of(draft)) or "depth" in mesh
    if layout == "forwards again":  # rows come once more, so that what came is not held until then
        assert names_of(draft).count("to_experts") == 2 * 3 and names_of(draft).count("from_experts") == 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("bias", [ONE, LAST], ids=["one for all tokens", "the last member's alone"])
@pytest.mark.parametrize("team", [2, 4])
def test_members_without_rows_and_with_all_of_them(bias: tuple[float, ...], team: int) -> None:
    """No token is dropped where all go to one member, which has room for them; others get none."""
    graph = mixture(bias)
    assert_a_team_trains_as_eager(graph, drafted(graph, lines("heads", team), team), tolerance=TOLERANCE)


@pytest.mark.slow
def test_members_that_keep_all_experts_send_no_rows() -> None:
    graph = mixture()
    draft = drafted(graph, lines("heads", 2).replace("team=2", "team=2, experts=false", 1), 2)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert "to_experts" not in names_of(draft) and not draft.programs[0].interface.divided
    assert "each has all experts in 1 layers (experts=false)" in draft.notes["split-context"]


def split(decision: TokenSplit, **options: Any) -> Draft:
    draft = Draft(mixture(), Hardware.cpu(num_devices=decision.team), Options(**options))
    SplitContext(by=decision.by, team=decision.team).rewrite(draft, decision)
    return draft


@pytest.mark.slow
def test_a_plan_that_members_cannot_follow_is_refused() -> None:
    with pytest.raises(PassError, match="'mlp' is no layer of experts of this model; it has experts"):
        split(TokenSplit(team=2, by="heads", experts=["mlp"]))
    with pytest.raises(PassError, match=r"it has 4 experts, which 8 members cannot share.*teams that can: \[2, 4\]"):
        split(TokenSplit(team=8, by="ring", experts=["experts"]))
    whole = {"whole_optimizer": "Muon", "takes_whole": lambda name: name.startswith("experts")}
    with pytest.raises(PassError, match="its optimizer looks at whole parameters"):
        split(TokenSplit(team=2, by="heads", experts=["experts"]), **whole)


def test_places_of_rows_follow_from_counts() -> None:
    """Two members with two experts each; the second one has rows for its own first expert alone."""
    ends = torch.tensor([[1, 3, 3, 4], [0, 0, 4, 4]], dtype=torch.int32)
    counts = torch.cat([expert_counts(each) for each in ends])
    assert counts.tolist() == [1, 2, 0, 1, 0, 0, 4, 0] and counts.dtype == torch.int32
    assert arrived_offsets(counts, torch.tensor([0]), 2).tolist() == [1, 3]
    assert arrived_offsets(counts, torch.tensor([1]), 2).tolist() == [4, 5]
    assert arrival_order(torch.tensor([[2, 1], [1, 2]])).tolist() == [0, 1, 3, 2, 4, 5]
