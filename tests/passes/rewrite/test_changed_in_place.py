"""A value that is written in place stays written where a pass puts another node in the place of its maker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import OpGraph
from penstock.passes.draft import Draft
from penstock.tests import zoo
from penstock.tests.graph.divide.sequences import PLAIN, WORDS, batches_of, graph_of, make_draft
from penstock.tests.passes.running import Batch, Eager, join_batches, reference
from penstock.tests.shown_elsewhere import slow_but

HEADS, WIDTH, MIDDLE = 4, 24, 40


class Changed(nn.Module):
    """Halves one value of two equal layers in place, or a view of it, before anything reads it."""

    def __init__(self, changed: str):
        super().__init__()
        self.changed = changed
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict(self.layer()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    @staticmethod
    def layer() -> dict[str, nn.Module]:
        linear: dict[str, nn.Module] = {name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}
        linear["out"] = nn.Linear(WIDTH, WIDTH, bias=False)  # rows are what members have added up
        return linear | {"up": nn.Linear(WIDTH, MIDDLE), "down": nn.Linear(MIDDLE, WIDTH)}

    def halve(self, name: str, value: Tensor) -> Tensor:
        if name == self.changed:
            value.mul_(0.5)
        elif f"view of {name}" == self.changed:
            value.view(-1).mul_(0.5)
        return value

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        rows, tokens = ids.shape
        place = torch.arange(tokens)
        h = self.halve("lookup", self.embed(ids)) + self.places(place)
        mask = (place <= place[:, None])[None, None]
        for layer in self.layers:
            q, k, v = (layer[name](h).view(rows, tokens, HEADS, -1).transpose(1, 2) for name in "qkv")
            seen = self.halve("attention", F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
            h = h + self.halve("rows", layer["out"](seen.transpose(1, 2).reshape(rows, tokens, WIDTH)))
            h = h + layer["down"](torch.relu(self.halve("columns", layer["up"](h))))
        logits = self.halve("logits", self.head(h))
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = self.halve("loss", F.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1), reduction="sum"))
        return {"loss": loss / wanted.ne(-100).sum(), "logits": logits}


VALUES = ("lookup", "view of lookup", "attention", "rows", "view of rows", "columns", "logits", "loss")
TEAMS = {
    "drop-masks": 1,
    "chunk-loss{tokens=4}": 1,
    "split-vocabulary{parts=2}": 1,
    "split-linear{parts=2}": 1,
    "tile-sequence{tokens=4}": 1,
    "split-context{team=2, by=heads}": 2,
    "split-context{team=2, by=ring}": 2,
    "split-context{team=2, by=rows}": 2,
    "split-width{team=2}": 2,
}
CASES = [(line, value) for line in TEAMS for value in VALUES]
QUICK = [
    ("chunk-loss{tokens=4}", "loss"),
    ("split-vocabulary{parts=2}", "view of lookup"),
    ("split-linear{parts=2}", "view of rows"),
    ("split-context{team=2, by=heads}", "attention"),
    ("split-width{team=2}", "view of rows"),
]


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_value_that_is_changed_in_place_stays_changed(case: tuple[str, str]) -> None:
    """In double precision, so that only the order of additions differs."""
    line, value = case
    pipeline = f"{line}, coarsen, mesh, {PLAIN}"
    with sdpa_kernel(SDPBackend.MATH):  # flash attention saves its result, which nothing may change then
        graph = graph_of(lambda: Changed(value))
        assert_trains_as_eager(graph, make_draft(graph, pipeline, TEAMS[line]), batches_of(2), 1e-12)


class Halved(nn.Module):
    """Halves the result of a module in place."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args).mul_(0.5)  # type: ignore[no-any-return]


class Counted(nn.Module):
    """The loss of a language model, summed and divided by a count."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, labels: Tensor, **tokens: Tensor) -> dict[str, Tensor]:
        logits = self.inner(**tokens).logits
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1), reduction="sum")
        return {"loss": loss / wanted.ne(-100).sum()}


EXPERTS = {"split-experts{parts=2}": 1, "split-context{team=2, by=heads}": 2, "split-width{team=2}": 2}


@pytest.mark.slow
@pytest.mark.parametrize("line", EXPERTS)
def test_experts_whose_result_is_changed_in_place(line: str) -> None:
    """In single precision, which products in groups have: tokens' values are about 1, in sums of 64."""
    model = zoo.mixtral(dropout=0.0, experts="grouped_mm")[0]
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.experts = Halved(layer.mlp.experts)
    batches = [zoo.token_batch(seed=seed) for seed in range(2)]
    graph = trace(Counted(model), batches[0])
    assert_trains_as_eager(graph, make_draft(graph, f"{line}, coarsen, mesh, {PLAIN}", EXPERTS[line]), batches, 1e-5)


def assert_trains_as_eager(graph: OpGraph, draft: Draft, batches: list[Batch], tolerance: float) -> None:
    """Compare losses and every gradient of two steps with those of the graph before the passes."""
    machine, eager = reference(draft), Eager(Draft(graph, draft.machine, draft.options))
    for _ in range(2):
        losses, grads = eager.step(batches)
        result = machine.step(join_batches(batches))["results"]["loss"]
        torch.testing.assert_close(list(result), losses, rtol=0, atol=tolerance)
        own = whole(draft.graph, machine.grads)
        assert own.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def whole(graph: OpGraph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters, with rows of one put together in order. Of a team's parts there is one value already."""
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, value in values.items():
        part = graph.parts[name].part if name in graph.parts else None
        rows[name if part is None else part.parameter][getattr(part, "begin", 0)] = value
    return {name: torch.cat([pieces[begin] for begin in sorted(pieces)]) for name, pieces in rows.items()}
