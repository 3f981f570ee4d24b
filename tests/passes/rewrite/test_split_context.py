"""`split-context`: members of a team train as eager PyTorch does, send what theory says, and refuse the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.costs import measured
from penstock.graph.costs.block import FakeBlockRun
from penstock.graph.edit import copy_graph
from penstock.ir import ops
from penstock.ir.calls import call_name
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory, work_of
from penstock.passes.decisions import By
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.split_context import SplitContext
from penstock.runtime.functions import ring_attention
from penstock.tests.graph.divide import sequences
from penstock.tests.graph.divide.sequences import (
    GROUPS,
    HEADS,
    MASKS,
    PLAIN,
    TOKENS,
    WIDTH,
    Decoder,
    Masked,
    assert_a_team_trains_as_eager,
    batches_of,
    graph_of,
    lines,
    make_draft,
    names_of,
    small,
)
from penstock.tests.shown_elsewhere import slow_but

SHARED = (
    "partition-min-stage, map-round-robin, schedule-1f1b, insert-remat{always=true}, insert-shard{tier=%s}, "
    "insert-two-hop, insert-optimizer"
)
LAYOUTS = {
    "a team": (2, 2, "mesh", PLAIN),
    "two teams": (4, 2, "mesh", PLAIN),
    "weights over the team": (2, 2, "mesh{shards=2}", SHARED % "device"),
    "weights over two teams": (4, 2, "mesh{shards=4}", SHARED % "dram"),
    "weights in DRAM": (2, 2, "mesh{shards=1}", PLAIN.replace("insert-fetch", "insert-fetch{swap=true}")),
    "a pipeline of teams": (4, 2, "mesh{depth=2}", PLAIN.replace("stages=1", "stages=2")),
    "split backwards": (4, 2, "mesh{depth=2}", PLAIN.replace("stages=1", "stages=2").replace("1f1b", "zero-bubble")),
    "activations in DRAM": (
        2, 2, "mesh",
        "partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline, choose-activations{swap=true}, "
        "insert-fetch{swap=true}, insert-optimizer",
    ),
}  # fmt: skip


MASKED = tuple(f"{by}: {kind}, {team}" for by in ("heads", "ring") for kind in MASKS for team in (2, 4))
CASES = [f"{by}: {layout}" for by in ("heads", "ring") for layout in LAYOUTS]


@pytest.mark.parametrize("case", slow_but(("heads: a team", "ring: a team"), tuple(CASES)))
def test_a_team_trains_as_eager(case: str) -> None:
    by, layout = case.split(": ")
    devices, team, mesh, rest = LAYOUTS[layout]
    graph = small()
    draft = make_draft(graph, lines(by, team, mesh, rest), devices)
    assert_a_team_trains_as_eager(graph, draft)
    if layout == "two teams":
        assert draft.programs[0].interface.teams == 2 and draft.graph.team == 2
    assert {"heads": "all_to_all", "ring": "pass_on"}[by] in names_of(draft) and "member" in names_of(draft)


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED)
def test_masks(case: str) -> None:
    """Rows of padding, and queries that see no key, included."""
    by, kind = case.split(": ")
    kind, team = kind.rsplit(", ", 1)
    graph = graph_of(lambda: Masked(kind))
    draft = make_draft(graph, f"drop-masks, {lines(by, int(team))}", int(team))
    assert_a_team_trains_as_eager(graph, draft)


@pytest.mark.slow
@pytest.mark.parametrize("team", [2, 4])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("by", ["heads", "ring"])
def test_larger_teams_and_attention_to_everything(by: str, is_causal: bool, team: int) -> None:
    graph = graph_of(lambda: Decoder(depth=1, is_causal=is_causal))
    assert_a_team_trains_as_eager(graph, make_draft(graph, lines(by, team), team))


def test_bytes_on_links_are_those_of_theory() -> None:
    """A member sends (N - 1) / N of the queries, keys, values and results of its own tokens, forward and back again for
    their gradients, and its loss; keys and values once for each of their own heads."""
    team, depth = 2, 1
    draft = make_draft(small(), lines("heads", team, rest=PLAIN.partition(", insert")[0]), team)
    told = (ops.all_to_all, ops.sum_parts)
    works = [(n.target, work_of(p, n)) for p in draft.programs for n in p.ops() if n.target in told]
    moved = [work.moved_bytes for op, work in works if op is ops.all_to_all]
    rows, own, each, size = 2, TOKENS // team, WIDTH // HEADS, 8  # bytes of a float64
    per_layer = rows * own * (HEADS + 2 * GROUPS + HEADS) * each * size
    assert sum(moved) == 2 * 2 * depth * per_layer  # two micro-batches, forward and backward
    assert [work.moved_bytes for op, work in works if op is ops.sum_parts] == [size, size]


@pytest.mark.slow
def test_a_ring_sends_keys_and_values_once_for_each_other_member() -> None:
    """N - 1 times, of their own heads, and again for backward, beside their gradients."""
    team, depth = 4, 1
    line = lines("ring", team, rest=PLAIN.partition(", insert")[0])
    draft = make_draft(small(), line, team, micro_batches=1)
    works = [work_of(p, n) for p in draft.programs for n in p.ops() if n.target is ops.pass_on]
    keys = 2 * (TOKENS // team) * GROUPS * (WIDTH // HEADS) * 8
    assert {work.moved_bytes for work in works} == {keys} and len(works) == 3 * 2 * (team - 1) * depth


@pytest.mark.slow
def test_a_window_sends_keys_and_values_as_far_as_queries_see() -> None:
    """To the next member of four, of whose four tokens each a window of five reaches into those of one before; again
    for backward, and gradients back."""
    graph, team = graph_of(lambda: Masked("window")), 4
    draft = make_draft(graph, f"drop-masks, {lines('ring', team, rest=PLAIN.partition(', insert')[0])}", team, 1)
    assert names_of(draft).count("pass_on") == 3 * 2


@pytest.mark.slow
def test_a_ring_may_keep_what_came_round() -> None:
    """Until backward, which is then sent the gradients alone."""
    team, graph = 4, small()
    draft = make_draft(graph, lines("ring, keep=true", team), team)
    assert_a_team_trains_as_eager(graph, draft)
    assert names_of(draft).count("pass_on") == 2 * 2 * 2 * (team - 1)  # two micro-batches, of keys and of values
    again = make_draft(graph, lines("ring", team), team)
    peaks = [profile_memory(d.programs[0]).peak_bytes[ops.DEVICE] for d in (draft, again)]
    assert peaks[1] < peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("queries", [4, 8])
def test_a_few_tiles_of_a_block_say_what_all_cost(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """Of a triangle, whose tiles see more keys one after another, and of a rectangle; an odd and an even number."""
    monkeypatch.setattr(sequences, "TOKENS", 144)
    monkeypatch.setattr(ring_attention, "QUERIES", queries)
    graph, found = graph_of(lambda: Decoder(depth=1)), []
    for some in (FakeBlockRun.some_of, lambda run, rows: iter(rows)):
        monkeypatch.setattr(FakeBlockRun, "some_of", some)
        monkeypatch.setattr(measured, "_KNOWN", {})
        specs = [stage.spec for stage in make_draft(copy_graph(graph), lines("ring", 2), 2).stages]
        found.append([
            (s.forward_flops, s.backward_flops, s.launches, s.kept_bytes, s.forward_workspace_bytes,
             s.light_workspace_bytes, s.backward_workspace_bytes)
            for s in specs
        ])  # fmt: skip
    assert found[0] == found[1] and found[0][1][2] > 144 // queries


@pytest.mark.parametrize("team", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_holds_nothing_of_other_members_until_backward(team: int) -> None:
    """Nor partial attentions but the last: what a micro-batch leaves for its backward does not grow with the team."""
    draft = make_draft(small(), lines("ring", team), team, micro_batches=1)
    program = draft.programs[0]
    first = next(n for n in program.ops() if n.target is ops.backward)
    before = set(itertools.takewhile(lambda node: node is not first, program.graph.nodes))
    lying = {n for n in before for user in n.users if user not in before and user.target is not ops.free}
    blocks = [n for n in lying if n.name.startswith(("pass_on", "with_gradients"))]
    assert [n.name for n in blocks] == [f"with_gradients_{team - 1}_m0"]
    forwards = [n for n in program.ops() if n.target is ops.forward]
    assert [n.kwargs.get("keep", True) for n in forwards] == [True, *[False] * team, True]


class Summed(Decoder):
    """A loss that needs logits only to compare them."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers[0](self.embed(ids), torch.arange(TOKENS)[:, None] / 7.0))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 9, "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["heads", "ring"])
def test_a_team_goes_without_whole_logits(by: str) -> None:
    graph = graph_of(lambda: Summed(depth=1))
    draft = make_draft(graph, f"chunk-loss{{tokens=3}}, {lines(by, 2)}", 2)
    assert any(call_name(node) == "chunked_cross_entropy" for node in draft.graph.nodes)
    assert_a_team_trains_as_eager(graph, draft)


class Odd(nn.Module):
    """A model with one call between embedding and loss."""

    def __init__(self, call: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embed, self.head, self.call = nn.Embedding(11, 6), nn.Linear(6, 11), call
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.call(self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / 7}


def scan(x: Tensor) -> Tensor:
    """A state that each token changes and reads."""
    state, results = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = state / 2 + x[:, i]
        results.append(state)
    return torch.stack(results, 1)


def split(model: nn.Module, team: int = 2, batch: Any = None, by: By = "heads") -> Draft:
    draft = Draft(trace(model, batch or batches_of(1)[0]), Hardware.cpu(num_devices=team), Options())
    p = SplitContext(by, team)
    p.rewrite(draft, p.plan(draft))
    return draft


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.cumsum(1), r"cumsum \(test_split_context\.py:\d+: .*cumsum\(1\).*\) lets tokens meet"),
        (lambda x: x - x.mean(1, keepdim=True), "lets tokens meet"),
        (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, 'use attn_implementation="sdpa"'),
        (lambda x: F.conv1d(x.mT, torch.ones(6, 1, 3), padding=2, groups=6).mT[:, :-2], r"conv1d .* lets tokens meet"),
        (lambda x: scan(x), r"test_split_context\.py:\d+: .*lets tokens meet"),
        (lambda x: F.dropout(x, 0.5), "draws random numbers for each token"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), r"not \(rows, heads, tokens, width\)"),
    ],
)
def test_what_lets_tokens_meet_is_refused_with_its_line(call: Any, said: str) -> None:
    with pytest.raises(PassError, match=said):
        split(Odd(call))


@pytest.mark.parametrize("call", [lambda x: x - x.mean(0, keepdim=True), lambda x: (x @ x[:1].mT).softmax(0) @ x])
def test_rows_that_meet_are_refused_in_words_about_rows(call: Any) -> None:
    with pytest.raises(PassError, match=r"(?s)lets rows meet\. Rows may meet in sums.*in one micro-batch"):
        split(Odd(call), by="rows")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (lines("heads", 3, "mesh{team=3}"), "16 tokens cannot be shared out equally as 3 pieces; the nearest length"),
        (lines("heads", 8, "mesh{team=8}"), r"has 4 heads, which 8 members cannot share; teams that can: \[2, 4\]"),
        (lines("heads", 2, "mesh{team=4}"), r"the work inside layers is divided among 2 members; use mesh\{team=2\}"),
        (f"coarsen, mesh{{team=2}}, {PLAIN}", "the work inside layers is not divided"),
        (f"split-context{{team=2}}, coarsen, {PLAIN}", r"no lanes are a team; put mesh\{team=2\} after coarsen"),
        (f"split-context{{team=2}}, coarsen{{level=operator}}, mesh, {PLAIN}", "knows no teams"),
        (lines("tokens", 2), "option by='tokens' is none of heads"),
        (lines("heads", 1), "a team has at least 2 members"),
        (lines("heads, keep=true", 2), "keep=true; with by=heads nothing goes round, use by=ring"),
        (lines("heads", 2, "mesh{shards=3, team=2}"), "one of the two is a multiple of the other"),
        (f"split-context{{team=2}}, split-width{{team=4}}, coarsen, mesh, {PLAIN}", "tokens already; set team=2"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(line: str, said: str) -> None:
    with pytest.raises(PassError, match=said):
        make_draft(small(), line, 8, micro_batches=8)


class Scaled(nn.Module):
    """Attention without gradients, an operand of which is multiplied afterwards, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in self.layers)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        q.mul_(3.0)
        logits = self.out(seen.transpose(1, 2).flatten(2))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 9, "logits": logits}


def test_an_operand_of_attention_that_changes_later_is_refused() -> None:
    with pytest.raises(PassError, match=r"has an operand, .*, that is changed in place after it"):
        split(Scaled())


@pytest.mark.slow
@pytest.mark.parametrize("by", slow_but(("ring",), ["heads", "ring", "rows"]))
def test_members_with_different_tokens_divide_layers(by: str) -> None:
    """The rows of all go to every member's columns, and each member gets its own rows of the sum."""
    graph = small()
    draft = make_draft(graph, f"split-context{{by={by}, team=2}}, split-width{{team=2}}, coarsen, mesh, {PLAIN}", 2)
    wide = {row.part.parameter for row in draft.graph.parts.values()}
    assert {"layers.0.up.weight", "layers.0.up.bias", "layers.0.down.weight"} <= wide
    assert {"gather_parts", "scatter_sum"} <= {*names_of(draft)}
    assert_a_team_trains_as_eager(graph, draft)


class Pooled(nn.Module):
    """A mean over tokens that layers read, a loss of rows, and one more that all members have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(self.embed(ids)).mean(1)))
        loss = F.cross_entropy(logits, labels[:, 0].clamp(min=0), reduction="sum") / 5
        return {"loss": loss + self.last.weight.square().sum(), "logits": logits}


@pytest.mark.slow
def test_a_sum_that_layers_read_is_added_up_by_the_team() -> None:
    graph = graph_of(Pooled)
    draft = make_draft(graph, lines("heads", 2), 2)
    assert_a_team_trains_as_eager(graph, draft)
    assert names_of(draft).count("sum_parts") == 2 * 3  # for each micro-batch the mean, its gradient, and the loss
