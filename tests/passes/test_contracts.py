"""The contracts of every pass, plans that change nothing, decisions that survive JSON, texts."""

from __future__ import annotations

import json

import pytest

from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.base import Pass, check_contracts
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.tests.passes.running import all_passes, apply, chain, draft_of, text_of


def state_of(draft: Draft) -> tuple[object, ...]:
    programs = text_of(draft)
    return [b.name for b in draft.blocks], draft.partition, [s.spec for s in draft.stages], draft.devices, programs


def tight() -> Hardware:
    """Two devices on which the chain below does not stay resident."""
    return Hardware.cpu(num_devices=2, memory="90kB", h2d="10MB/s", d2h="10MB/s")


def test_the_whole_pipeline_keeps_its_contracts() -> None:
    check_contracts(all_passes())
    names = [p.name for p in all_passes()]
    assert names == [
        "coarsen", "partition-balanced", "map-round-robin", "schedule-pipeline", "insert-remat", "insert-fetch",
        "insert-optimizer",
    ]  # fmt: skip
    assert len({p.fields()[0] for p in all_passes()}) == len(names)


@pytest.mark.parametrize("missing", range(6))
def test_a_pass_without_what_it_needs_is_refused(missing: int) -> None:
    passes = all_passes()
    gone = passes.pop(missing)
    with pytest.raises(PassError, match=f"needs {gone.gives[0]}, which no pass before it gives"):
        check_contracts(passes)


def test_the_message_says_which_pass_to_move() -> None:
    with pytest.raises(PassError, match=r"pass 'insert-remat' needs programs.*put schedule-pipeline before it"):
        check_contracts([Coarsen(), PartitionBalanced(), MapRoundRobin(), InsertRemat(), SchedulePipeline()])
    with pytest.raises(PassError, match="pass 'coarsen' comes twice"):
        check_contracts([Coarsen(), Coarsen()])


@pytest.mark.parametrize("hardware", [Hardware.cpu(num_devices=2), tight()], ids=["roomy", "tight"])
def test_plans_change_nothing_and_survive_json(hardware: Hardware) -> None:
    draft = draft_of(chain(), hardware, micro_batches=2)
    for p in all_passes(4):
        before = state_of(draft)
        decision = p.plan(draft)
        assert p.plan(draft) == decision
        assert state_of(draft) == before
        assert json.loads(json.dumps(decision)) == decision
        apply(draft, p, decisions={p.fields()[0]: json.loads(json.dumps(decision))})


def test_the_same_decisions_give_the_same_programs() -> None:
    first = draft_of(chain(), tight(), micro_batches=2)
    decisions = {}
    for p in all_passes(4):
        decisions[p.fields()[0]] = p.plan(first)
        apply(first, p, decisions=decisions)
    second = draft_of(chain(), Hardware.cpu(num_devices=2), micro_batches=2)
    apply(second, *all_passes(4), decisions=decisions)
    assert text_of(first) == text_of(second)


BAD: list[tuple[Pass, object, str]] = [
    (Coarsen(), {"layers.0": 3}, "the plan's blocks are not those of this model"),
    (PartitionBalanced(), [["layers.0"], ["head"]], "no stage holds block 'layers.1'"),
    (PartitionBalanced(), [["layers.0", "layers.0"]], "block 'layers.0' is in two stages"),
    (PartitionBalanced(), [["layer.7"]], "stage 0 names block 'layer.7', which this model does not have"),
    (PartitionBalanced(), [["layers.0"], []], "stage 1 holds no block"),
    (
        PartitionBalanced(),
        [["layers.1"], ["layers.0", "layers.2", "layers.3", "head"]],
        "stage 0 reads .* of the later stage 1: a cycle",
    ),
    (MapRoundRobin(), [0, 1], "devices has 2 entries, there are 4 stages"),
    (MapRoundRobin(), [0, 1, 2, 3], "devices names device 2; there are 0 to 1"),
    (InsertRemat(), ["stage9"], "rematerialise names 'stage9'; the stages are stage0, stage1, stage2, stage3"),
    (InsertFetch(), {"stage9": []}, "fetch names 'stage9'; the stages are stage0"),
    (InsertFetch(), {"stage0": ["sideways"]}, r"fetch of stage0 names the phases \['sideways'\]"),
    (InsertOptimizer(), {"stage0": "device"}, "optimizer says nothing of stage1"),
    (InsertOptimizer(), dict.fromkeys(("stage0", "stage1", "stage2", "stage3"), "dram"), "stage0 is resident"),
]


@pytest.mark.parametrize(("p", "decision", "message"), BAD, ids=[f"{p.name}-{i}" for i, (p, _, _) in enumerate(BAD)])
def test_decisions_that_cannot_be_carried_out(p: Pass, decision: object, message: str) -> None:
    draft = draft_of(chain(), micro_batches=2)
    before = all_passes(4)
    apply(draft, *before[: [q.name for q in before].index(p.name)])
    with pytest.raises(PassError, match=message):
        p.rewrite(draft, decision)
