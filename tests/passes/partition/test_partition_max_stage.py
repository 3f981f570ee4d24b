"""`partition-max-stage`: stages that hold no block more, on devices of any size."""

from __future__ import annotations

import pytest

from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.partition_max_stage import PartitionMaxStage
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, chain, draft_of


def draft_on(*memories: str, depth: int = 8) -> Draft:
    document = Hardware.cpu(num_devices=len(memories)).model_dump(mode="json")
    for device, memory in zip(document["devices"], memories):
        device["memory_bytes"] = memory
    draft = draft_of(chain(depth=depth, width=32), Hardware.model_validate(document), micro_batches=2)
    return apply(draft, Coarsen())


@pytest.mark.parametrize("memories", [("200kB", "200kB"), ("90kB", "300kB"), ("130kB",), ("150kB", "100kB", "250kB")])
def test_stages_fit_and_hold_no_block_more(memories: tuple[str, ...]) -> None:
    draft = draft_on(*memories)
    found, loads = PartitionMaxStage().plan(draft), Loads(draft)
    order = [block.name for block in draft.blocks]
    assert [name for names in found["stages"] for name in names] == order
    stages = [tuple(order.index(name) for name in names) for names in found["stages"]]
    for device in range(len(memories)):
        own = [stage for stage, d in zip(stages, found["planned_for"]) if d == device]
        assert loads.fits(own, device)
    rounds = max(found["planned_for"].count(device) for device in found["planned_for"])
    for stage, device in list(zip(stages, found["planned_for"]))[:-1]:
        longer = (*stage, stage[-1] + 1)
        assert not loads.fits([longer] * rounds, device)


def test_what_fits_one_device_runs_there_alone() -> None:
    found = PartitionMaxStage().plan(draft_on("10MB", "10MB"))
    assert (len(found["stages"]), found["planned_for"]) == (1, [0])


def test_a_device_too_small_for_a_block_is_passed_over() -> None:
    found = PartitionMaxStage().plan(draft_on("20kB", "200kB"))
    assert len(found["stages"]) > 1 and set(found["planned_for"]) == {1}


def test_a_block_larger_than_every_device_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone needs .* the largest has 29.3 KiB"):
        PartitionMaxStage().plan(draft_on("20kB", "30kB"))
