"""The best candidate is refined: one thing of it is exchanged at a time."""

from __future__ import annotations

import pytest

from penstock.compiler.search import candidates
from penstock.compiler.search.candidate import PLAIN, Candidate
from penstock.compiler.search.candidates import has_few_blocks, numbers_near
from penstock.compiler.search.search import Sweep
from penstock.ir.machine.hardware import Hardware
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition.partition_min_stage import PartitionMinStage
from penstock.passes.partition_mip.partition_mip import PartitionMip
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, chain, draft_of

EXCHANGED = ["computed_again", "other_tiles", "other_losses", "other_numbers"]
AFTER = ["one_phase_ahead", "in_turns"]


def test_one_thing_after_the_other_until_none_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gains, so a third round finds nothing."""
    gains, looked = [3, 8], list[str]()  # after so many looks
    sweep = Sweep.__new__(Sweep)
    for name in (*EXCHANGED, *AFTER):
        monkeypatch.setattr(sweep, name, lambda count, name=name: [name])

    def look(count: int, candidates: list[str]) -> None:
        looked.extend(candidates)
        if len(looked) in gains:
            sweep.best = object()  # type: ignore[assignment]

    monkeypatch.setattr(sweep, "look", look)
    sweep.best = object()  # type: ignore[assignment]
    sweep.refine(2)
    assert looked == [*EXCHANGED * 3, *AFTER]


def test_other_numbers_of_stages_are_those_near_by(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of(chain(), Hardware.cpu(num_devices=2))
    apply(draft, Coarsen(), PartitionBalanced(stages=3))
    most = len(draft.blocks)

    def numbers(candidate: Candidate) -> list[int]:
        cuts = (near.partition for near in numbers_near(draft, candidate))
        return [cut.stages for cut in cuts if isinstance(cut, PartitionBalanced | PartitionMip)]

    assert has_few_blocks(draft) and numbers(PLAIN) == []
    monkeypatch.setattr(candidates, "has_few_blocks", lambda draft: False)
    assert numbers(PLAIN) == numbers(PLAIN.with_(PartitionMip(stages=3))) == [n for n in (2, 4, 1, 5) if n <= most]
    assert numbers(PLAIN.with_(PartitionMinStage())) == []
