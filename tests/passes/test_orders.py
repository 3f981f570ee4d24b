"""Every order of the passes of a pipeline trains as eager PyTorch, or is refused in our own words."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.pipeline import BETWEEN_PASSES, parse_pipeline, run_passes
from penstock.compiler.strategies import STRATEGIES
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import PassError, PenstockError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.base import Pass
from penstock.passes.table import PASSES
from penstock.tests.passes.running import Batch, assert_trains_like_eager, draft_of, traced_model
from penstock.tests.shown_elsewhere import slow_but

STAGES = "partition-balanced, map-round-robin, schedule-pipeline"
TAIL = f"{STAGES}, insert-remat, insert-fetch, insert-optimizer, take-turns"
PIPELINES = {
    "chunks": f"drop-masks, recompute-pointwise, chunk-loss{{tokens=4}}, interleave-forwards, coarsen, {TAIL}",
    "tiles": f"tile-sequence{{tokens=4}}, coarsen, {TAIL}",
    "vocabulary": f"split-vocabulary{{parts=2}}, coarsen, {TAIL}",
    "layers": f"split-linear{{parts=2}}, coarsen, {TAIL}",
    "width": f"split-width, recompute-pointwise, coarsen, mesh{{team=2}}, {TAIL}",
    "ssd": (
        "coarsen, partition-min-stage, map-sequential, schedule-1f1b, keep-stages{tier=all}, "
        "choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer, "
        "take-turns"
    ),
    "shards": (
        "chunk-loss{tokens=4}, coarsen, mesh{shards=2}, partition-min-stage, map-round-robin, schedule-1f1b, "
        "insert-remat, insert-shard, insert-two-hop, insert-optimizer"
    ),
    "asynchronous": (
        "drop-masks, coarsen{level=operator}, partition-mixed{asynchronous=true}, map-cross, schedule-async"
    ),
}
TOLERANCE = 1e-5  # teams, chunks and tiles add up in other orders


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.heads(self.norm(x)).view(rows, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, 8))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(32, 8), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@functools.cache
def language() -> tuple[OpGraph, list[Batch]]:
    torch.manual_seed(0)
    batches = [{name: torch.randint(0, 32, (2, 8)) for name in ("ids", "labels")} for _ in range(4)]
    return traced_model(Language(), batches)


def orders(line: str) -> Iterator[str]:
    """The pipeline, and all in which one of its passes is elsewhere."""
    passes = [part.strip() for part in BETWEEN_PASSES.split(line)]
    moved = (passes[:i] + passes[i + 1 :] for i in range(len(passes)))
    found = {(*rest[:j], passes[i], *rest[j:]) for i, rest in enumerate(moved) for j in range(len(passes))}
    return map(", ".join, sorted(found))


def run_order(line: str) -> str:
    """Train by a pipeline. Returns the refusal; "" where it trains."""
    graph, batches = language()
    hardware = Hardware.cpu(2, memory="1MB", dram="1GB", ssd="1GB", h2d="1GB/s", d2h="1GB/s")
    draft = draft_of(graph, hardware, micro_batches=len(batches))
    try:
        passes = parse_pipeline(line, 2)
        run_passes(draft, passes)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    if all(p.synchronous for p in passes) and draft.graph.team == 1:  # eager has no members of a team
        assert_trains_like_eager(draft, batches, TOLERANCE, steps=1)
    return ""


def test_the_pipelines_have_a_pass_of_each_kind() -> None:
    lines = ", ".join(PIPELINES.values())
    missing = {name for name, kind in PASSES.items() if not any(other in lines for other in _names_of_kind(kind))}
    # Of other models, of losses that are rewritten, of quantised weights, and of norms that are spelled out.
    assert missing == {"split-experts", "split-context", "unpack-once", "fuse-pointwise", "use-float8"}


def _names_of_kind(kind: type[Pass]) -> list[str]:
    return [name for name, other in PASSES.items() if other.fields()[0] == kind.fields()[0]]


@pytest.mark.parametrize("name", slow_but(set(PIPELINES) - {"chunks", "width"}, PIPELINES))
def test_a_pass_that_is_moved_works_or_is_refused(name: str) -> None:
    assert not run_order(PIPELINES[name])
    refusals = {line: run_order(line) for line in orders(PIPELINES[name])}
    assert sum(map(bool, refusals.values())) > len(refusals) / 2  # most orders are none
    assert all(text.startswith(("PassError", "DoesNotFit")) for text in refusals.values() if text)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_pass_that_is_moved_works_or_is_refused_in_every_strategy(name: str) -> None:
    refusals = [run_order(line) for line in orders(STRATEGIES[name])]
    assert all(text.startswith(("PassError", "DoesNotFit")) for text in refusals if text)


@pytest.mark.parametrize(
    "name", ["drop-masks", "chunk-loss", "split-width", "split-context", "tile-sequence", "recompute-pointwise"]
)
def test_what_changes_the_graph_comes_before_its_blocks(name: str) -> None:
    """`coarsen, chunk-loss` ended in a KeyError where the loss was made in chunks."""
    with pytest.raises(PassError, match=f"pass '{name}' comes after 'coarsen', which reads what it changes"):
        parse_pipeline(f"coarsen, {name}, {TAIL}", 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("coarsen, partition-balanced, mesh, map-round-robin", "'mesh' comes after 'partition-balanced'"),
        (PIPELINES["ssd"].replace("insert-ssd{tier=all}, overlap-optimizer", "overlap-optimizer, insert-ssd"),
         "'insert-ssd' comes after 'overlap-optimizer'"),
        (PIPELINES["shards"].replace("insert-two-hop, insert-optimizer", "insert-optimizer, insert-two-hop"),
         "'insert-two-hop' comes after 'insert-optimizer'"),
    ],
)  # fmt: skip
def test_later_passes_state_their_order_too(line: str, words: str) -> None:
    with pytest.raises(PassError, match=words):
        parse_pipeline(line, 2)
