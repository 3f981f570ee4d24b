"""The best candidate is refined: one thing of it is exchanged at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.compiler.search import moves
from penstock.compiler.search.candidate import PLAIN, Candidate
from penstock.compiler.search.moves import Position, refine, variants
from penstock.ir.machine.hardware import Hardware
from penstock.passes.base import Pass, PlanSoFar
from penstock.passes.memory.take_turns import TakeTurns
from penstock.passes.memory.unpack_once import UnpackOnce
from penstock.passes.partition import partition
from penstock.passes.partition.partition import has_few_blocks
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition.partition_min_stage import PartitionMinStage
from penstock.passes.partition_mip.partition_mip import PartitionMip
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.passes.table import PASSES
from penstock.tests.passes.running import apply, chain, draft_of

EXCHANGED = ["recompute-pointwise", "tile-sequence", "chunk-loss", "partition-balanced", "partition-mip"]
AFTER = ["unpack-once", "insert-fetch", "take-turns"]


def test_the_passes_that_have_variants() -> None:
    own = [name for name, kind in PASSES.items() if kind.variants.__func__ is not Pass.variants.__func__]  # type: ignore[attr-defined]
    partitions = [name for name in own if name.startswith("partition-")]
    assert sorted({*own} - {*partitions}) == sorted({*EXCHANGED, *AFTER} - {*partitions})
    sized = [name for name in partitions if PASSES[name]().with_stages(2) is not None]  # type: ignore[attr-defined]
    assert sized == ["partition-balanced", "partition-mip"]


def test_one_thing_after_the_other_until_none_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gains, so a third round finds nothing."""
    gains, looked = [3, 8], list[Any]()  # after this number of candidates
    names = {*EXCHANGED, *AFTER}
    monkeypatch.setattr(moves, "variants", lambda position, kind: [kind.name] if kind.name in names else [])
    position = Position.__new__(Position)
    position.attempts = SimpleNamespace(best=object())  # type: ignore[assignment]
    for candidate in refine(position):
        looked.append(candidate)
        if len(looked) in gains:
            position.attempts.best = object()  # type: ignore[assignment]
    assert looked == [*EXCHANGED * 3, *AFTER]


def test_other_numbers_of_stages_are_those_near_by(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of(chain(), Hardware.cpu(num_devices=2))
    apply(draft, Coarsen(), PartitionBalanced(stages=3))
    most = len(draft.blocks)

    def numbers(candidate: Candidate, **more: bool) -> list[int]:
        best = PlanSoFar(candidate.passes, draft, draft, is_short=more.pop("is_short", True), **more)
        forms = [form for kind in PASSES.values() for form in kind.variants(best)]
        return [form.stages for form in forms if isinstance(form, PartitionBalanced | PartitionMip)]

    assert has_few_blocks(draft) and numbers(PLAIN) == []
    monkeypatch.setattr(partition, "has_few_blocks", lambda draft: False)
    assert numbers(PLAIN) == numbers(PLAIN.with_(PartitionMip(stages=3))) == [n for n in (2, 4, 1, 5) if n <= most]
    assert numbers(PLAIN.with_(PartitionMinStage())) == []
    assert numbers(PLAIN, is_short=False) == numbers(PLAIN, is_shared=True) == []


def test_a_variant_takes_the_place_of_its_pass() -> None:
    """A pass over the op graph that is new comes after the others of its kind, any other before what it precedes, or at
    the end."""
    again = PLAIN.replace_pass(RecomputePointwise, RecomputePointwise())
    assert again == PLAIN.with_graph_passes(*PLAIN.graph_passes, RecomputePointwise())
    assert again.replace_pass(RecomputePointwise, None) == PLAIN
    chunked = PLAIN.replace_pass(ChunkLoss, ChunkLoss(64))
    assert chunked.graph_passes.index(ChunkLoss(64)) == PLAIN.graph_passes.index(ChunkLoss())
    assert PLAIN.replace_pass(TakeTurns, TakeTurns()).passes == (*PLAIN.passes, TakeTurns())
    once = [p.name for p in PLAIN.replace_pass(UnpackOnce, UnpackOnce()).passes]
    assert once[once.index("unpack-once") - 1 :][:3] == ["insert-remat", "unpack-once", "insert-fetch"]
    named = Candidate.parse("mobius", 2)
    assert named.replace_pass(TakeTurns, TakeTurns()) is named and named.replace_pass(RecomputePointwise, None) is named


def test_a_name_says_what_is_not_usual() -> None:
    """In the same order whatever the order of passes: schedules and fetches, tiers, passes over the graph, SSDs."""
    leaving = PLAIN.with_tiering(activations=True, reservoir=True, swap=True)
    changed = leaving.replace_pass(RecomputePointwise, RecomputePointwise()).replace_pass(ChunkLoss, None)
    assert changed.replace_pass(TakeTurns, TakeTurns()).label == (
        "partition-balanced, map-round-robin, swapped, activations chosen, links in turns, recompute-pointwise, "
        "whole logits, reservoir"
    )
    assert PLAIN.with_tiering(overlap=True).label == "partition-balanced, map-round-robin, optimizer overlapped"


@pytest.mark.parametrize(("kind", "cut"), [(ChunkLoss, PartitionMip(stages=7, deadline_s=1.0)), (TakeTurns, None)])
def test_another_graph_keeps_the_number_of_stages(
    monkeypatch: pytest.MonkeyPatch, kind: type[Pass], cut: PartitionMip | None
) -> None:
    """Else partition-mip looks through all numbers of stages once more for each variant of a pass over the op graph."""
    monkeypatch.setattr(kind, "variants", classmethod(lambda own, best: [own(), None]))
    best = PLAIN.with_(PartitionMip())
    found = SimpleNamespace(draft=SimpleNamespace(stages=[None] * 7))
    position: Any = SimpleNamespace(plan_so_far=None, best=best, leaders=[], attempts=SimpleNamespace(best=found))
    candidates = variants(position, kind)
    assert candidates and {candidate.partition for candidate in candidates} == {cut or PartitionMip()}
