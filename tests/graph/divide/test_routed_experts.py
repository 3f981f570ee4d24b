"""Experts of members with different tokens: equal to eager PyTorch, bytes as theory says, wrong programs caught."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.graph.experts.layers import find_expert_layers
from penstock.graph.experts.token_sums import token_sums
from penstock.graph.follow.tokens import token_facts
from penstock.graph.opgraph import OpGraph
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import parse_program, print_program, work_of
from penstock.ir.verify import verify
from penstock.passes.decisions import TokenSplit
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.split_context import SplitContext
from penstock.runtime.experts.routes import Arrivals, arrived_offsets, arrived_places, token_experts
from penstock.tests import zoo
from penstock.tests.graph.divide.mixtures import EXPERTS, TOP, WIDTH, BentExperts, Experts, Mixture, WideExperts
from penstock.tests.graph.divide.sequences import (
    PLAIN,
    TOKENS,
    assert_a_team_trains_as_eager,
    batches_of,
    lines,
    make_draft,
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
def mixture(bias: tuple[float, ...] = EVEN, experts: type[Experts] = Experts) -> OpGraph:
    """Shared by tests, which do not change it."""
    torch.manual_seed(3)
    return trace(Mixture(bias, experts=experts), batches_of(1)[0])


def test_rows_of_a_team_go_to_experts_and_back() -> None:
    graph = mixture()
    draft = make_draft(graph, lines("rows", 2), 2)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert draft.programs[0].interface.sums_in_team
    assert "each has 2 of 4 experts, to which tokens go by count, in 1 layers" in draft.notes["split-context"]
    _check_bytes(draft, 2)
    _check_sums_and_micro_batches(draft)


def _check_bytes(draft: Draft, team: int) -> None:
    """A micro-batch's tokens and their experts' shares go once to each member with experts of them, and one sum comes
    back; gradients take the same ways. Of that (N - 1) / N leaves the member. Of the experts of its tokens, each member
    tells all others."""
    works = [(n.target, work_of(p, n)) for p in draft.programs for n in p.ops()]
    tokens = 2 * TOKENS // team
    visits = team * (1 - math.comb(EXPERTS - EXPERTS // team, TOP) / math.comb(EXPERTS, TOP))
    assert visits == pytest.approx(5 / 3)  # of two experts of a token, two of three are on the other member
    sent, shares = round(tokens * WIDTH * 4 * visits), round(tokens * TOP * 4 * visits)
    for op in (ops.to_experts, ops.from_experts):
        found = [work.moved_bytes for target, work in works if target is op]
        assert sorted(found) == [shares] * 2 + [sent] * 2 * 2  # micro-batches
        assert {work.pattern for target, work in works if target is op} == {ops.PAIRS}
    routes = [work.moved_bytes for target, work in works if target is ops.gather_parts]
    assert routes == [team * tokens * TOP * 4] * 2


def _check_sums_and_micro_batches(draft: Draft) -> None:
    """Caught are programs without the team's sum of a router's gradients, that would add up gradients of different
    experts, and that take the routes of another micro-batch."""
    for changes, said in (
        ((("g0_team, = rt.all_reduce(g0_m1, group=\"team\", parts=False)", ""), ("g0_team", "g0_m1")),
         "the gradients of stage0, of which members of a team have different tokens, were not summed over the team"),
        ((("rt.step(\"stage1\", g1_m1)", "x, = rt.all_reduce(g1_m1, group=\"team\")\n    rt.step(\"stage1\", x)"),
          ("rt.free(g1_m1)", "rt.free(x)")),
         "gradients of parts are of different weights on each member; use parts=False"),
        ((("rt.to_experts(tokens_to_send_m1, gather_alike_m1,", "rt.to_experts(tokens_to_send_m1, gather_alike_m0,"),
          ("rt.free(gather_alike_m0, d_to_experts_1_m0_s1)", "rt.free(d_to_experts_1_m0_s1)"),
          ("rt.free(tokens_to_send_m1)", "rt.free(tokens_to_send_m1, gather_alike_m0)")),
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
            make_draft(graph, lines(by, team, mesh, rest), devices)
        return
    draft = make_draft(graph, lines(by, team, mesh, rest), devices)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert {"to_experts", "from_experts"} <= set(names_of(draft)) or "depth" in mesh
    if layout == "forwards again":  # tokens and shares come once more, so that what came is not held until then
        assert names_of(draft).count("to_experts") == 2 * 5 and names_of(draft).count("from_experts") == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("bias", [ONE, LAST], ids=["one for all tokens", "the last member's alone"])
@pytest.mark.parametrize("team", [2, 4])
def test_members_without_rows_and_with_all_of_them(bias: tuple[float, ...], team: int) -> None:
    """No token is dropped where all go to one member, which has room for them; others get none."""
    graph = mixture(bias)
    assert_a_team_trains_as_eager(graph, make_draft(graph, lines("heads", team), team), tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("team", [2, 4])
def test_rows_whose_sums_are_not_known_go_to_experts_one_by_one(team: int) -> None:
    """Each for its expert, as there is more between the last product and the sum than the router's weights."""
    graph = mixture(experts=BentExperts)
    draft = make_draft(graph, lines("heads", team), team)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    works = [work_of(p, n) for p in draft.programs for n in p.ops() if n.target is ops.to_experts]
    assert {work.moved_bytes for work in works} == {2 * TOKENS // team * TOP * WIDTH * 4} and len(works) == 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("team", [2, 4])
def test_results_that_are_summed_in_a_larger_type_come_back_one_by_one(team: int) -> None:
    """So that none is rounded once more. Tokens go to a member once, and gradients come from there once."""
    graph = mixture(experts=WideExperts)
    draft = make_draft(graph, lines("heads", team), team)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    tokens_bytes = 2 * TOKENS // team * WIDTH * 4
    visits = team * (1 - math.comb(EXPERTS - EXPERTS // team, TOP) / math.comb(EXPERTS, TOP))
    for op in (ops.to_experts, ops.from_experts):
        works = [work_of(p, n) for p in draft.programs for n in p.ops() if n.target is op]
        wanted = [round(tokens_bytes * visits)] * 2 + [tokens_bytes * TOP] * 2
        assert sorted(work.moved_bytes for work in works) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_sums_of_tokens_are_known_as_modelling_code_writes_them(model: str) -> None:
    """With the router's weights, which are multiplied where the experts are."""
    made, _ = getattr(zoo, model)(dropout=0.0)
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    graph = trace(made, {"input_ids": ids, "labels": ids})
    layers = find_expert_layers(graph)
    found = [token_sums(graph, layer, token_facts(graph, TOKENS)) for layer in layers.values()]
    each = 3 if model == "qwen3_moe" else 2
    assert found and all(sums and sums.each == each and len(sums.shares) == 1 for sums in found)


@pytest.mark.slow
def test_members_that_keep_all_experts_send_no_rows() -> None:
    graph = mixture()
    draft = make_draft(graph, lines("heads", 2).replace("team=2", "team=2, experts=false", 1), 2)
    assert_a_team_trains_as_eager(graph, draft, tolerance=TOLERANCE)
    assert "to_experts" not in names_of(draft) and not draft.programs[0].interface.divided
    assert "each has all experts in 1 layers (experts=false)" in draft.notes["split-context"]


def split(decision: TokenSplit, **options: Any) -> Draft:
    draft = Draft(mixture(), Hardware.cpu(num_devices=decision.team), Options(**options))
    SplitContext(by=decision.by, team=decision.team).rewrite(draft, decision)
    return draft


def test_a_member_that_keeps_all_experts_counts_its_own_rows() -> None:
    """Those of half of the tokens, by which it puts rows sorted by expert back in order."""
    graph = split(TokenSplit(team=2, by="heads", experts=[])).graph
    (placed,) = [node for node in graph.graph.nodes if node.target is operator.setitem]
    (counted,) = [node for node in placed.all_input_nodes if node.target is torch.arange]
    assert counted.args == (2 * TOKENS * TOP // 2,)


@pytest.mark.slow
def test_a_plan_that_members_cannot_follow_is_refused() -> None:
    with pytest.raises(PassError, match="'mlp' is no layer of experts of this model; it has experts"):
        split(TokenSplit(team=2, by="heads", experts=["mlp"]))
    with pytest.raises(PassError, match=r"it has 4 experts, which 8 members cannot share.*teams that can: \[2, 4\]"):
        split(TokenSplit(team=8, by="ring", experts=["experts"]))
    whole = {"whole_optimizer": "Muon", "takes_whole": lambda name: name.startswith("experts")}
    with pytest.raises(PassError, match="its optimizer looks at whole parameters"):
        split(TokenSplit(team=2, by="heads", experts=["experts"]), **whole)


def test_places_of_rows_follow_from_routes() -> None:
    """Two members with two tokens and two experts each; the first token goes to both of the second member's."""
    routes = torch.tensor([[2, 3], [0, 3], [1, 0], [2, 0]], dtype=torch.int32)
    rows = torch.tensor([1, 2, 0, 3])  # of the first member: its tokens' rows, sorted by expert
    assert token_experts(torch.tensor([1, 1, 2, 4], dtype=torch.int32), rows, 2).tolist() == [[2, 3], [0, 3]]
    assert arrived_offsets(routes, torch.tensor([0]), 2, 4).tolist() == [3, 4]
    assert arrived_offsets(routes, torch.tensor([1]), 2, 4).tolist() == [2, 4]
    assert arrived_places(routes, 1, 2, 4)[:4].tolist() == [0, 6, 1, 3]
    first, second = (Arrivals(routes, member, 2, 4) for member in range(2))
    assert (first.counts, second.counts) == ([1, 2], [2, 1])
    assert (second.tokens_from(0).tolist(), second.tokens_from(1).tolist()) == ([0, 1], [1])
    assert second.tokens.tolist() == [0, 2, 0, 1]
    assert second.sums(torch.tensor([[1.0], [2.0], [4.0], [8.0]])).tolist() == [[5.0], [8.0], [2.0]]
