"""`partition-min-stage`: a block a stage, on the devices in turn."""

from __future__ import annotations

import pytest

from penstock.ir.errors import DoesNotFit
from penstock.passes.partition.partition_min_stage import PartitionMinStage
from penstock.tests.passes.partition.test_partition_max_stage import draft_on


def test_each_block_is_a_stage_of_the_next_device() -> None:
    draft = draft_on("10MB", "10MB", "10MB", depth=6)
    found = PartitionMinStage().plan(draft)
    assert found["stages"] == [[block.name] for block in draft.blocks]
    assert found["planned_for"] == [0, 1, 2, 0, 1, 2, 0]


def test_a_device_takes_what_it_holds_and_is_passed_over_else() -> None:
    """The head is small, a layer is not."""
    found = PartitionMinStage().plan(draft_on("20kB", "10MB", depth=3))
    assert found["planned_for"] == [1, 1, 1, 0]


def test_more_devices_than_blocks() -> None:
    assert PartitionMinStage().plan(draft_on(*["10MB"] * 5, depth=1))["planned_for"] == [0, 1]


def test_a_block_larger_than_every_device_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone needs"):
        PartitionMinStage().plan(draft_on("20kB"))


@pytest.mark.slow
def test_inputs_that_leave_are_held_one_stage_at_a_time() -> None:
    """Of the many stages of one device; with them all it would need more than it has."""
    tight = draft_on("60kB", depth=60)
    with pytest.raises(DoesNotFit, match="alone needs"):
        PartitionMinStage().plan(tight)
    assert len(PartitionMinStage(inputs_leave=True).plan(tight)["stages"]) == 61
