"""`partition-metis`: parts of equal time become convex stages in topological order, as small as memory asks."""

from __future__ import annotations

import pytest

from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.partition_metis import PartitionMetis, levels_of
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.partition.test_partition_max_stage import draft_on
from penstock.tests.passes.running import apply, chain, draft_of, trace_case


def indices(draft: Draft, stages: list[list[str]]) -> list[tuple[int, ...]]:
    order = [block.name for block in draft.blocks]
    return [tuple(map(order.index, names)) for names in stages]


@pytest.mark.parametrize("name", ["t5", "gpt2", "wide_resnet", "mixtral"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_all_devices_are_about_equally_busy(name: str, num_devices: int) -> None:
    draft = apply(draft_of(trace_case(name)[0], Hardware.cpu(num_devices=num_devices)), Coarsen())
    found, loads = PartitionMetis().plan(draft), Loads(draft)
    busy_s = [0.0] * num_devices
    for stage, device in zip(indices(draft, found["stages"]), found["planned_for"]):
        busy_s[device] += sum(loads.time_s[device][i] for i in stage)
    largest_s = max(loads.time_s[0])
    assert max(busy_s) <= sum(busy_s) / num_devices + largest_s
    apply(draft, PartitionMetis())  # builds the stages, which is refused where one reads a later one


def test_a_part_that_is_left_and_entered_again_is_two_stages() -> None:
    """Device 0, then 1, then 0 again: its blocks are at levels 0 and 2."""
    draft = apply(draft_of(chain(depth=5), Hardware.cpu(num_devices=2)), Coarsen())
    assert levels_of(Loads(draft), [0, 0, 1, 1, 0, 0]) == [0, 0, 1, 1, 2, 2]
    assert levels_of(Loads(draft), [0, 1, 0, 1, 0, 1]) == [0, 1, 2, 3, 4, 5]
    assert levels_of(Loads(draft), [1] * 6) == [0] * 6


def test_faster_devices_get_more() -> None:
    document = Hardware.cpu(num_devices=2).model_dump()
    document["devices"][1]["op_overhead_s"] /= 3
    draft = apply(draft_of(chain(depth=15), Hardware.model_validate(document)), Coarsen())
    found = PartitionMetis().plan(draft)
    sizes = [0, 0]
    for names, device in zip(found["stages"], found["planned_for"]):
        sizes[device] += len(names)
    assert 10 <= sizes[1] <= 13


@pytest.mark.parametrize("memories", [("90kB", "90kB"), ("70kB", "300kB"), ("20kB", "200kB")])
def test_stages_are_cut_until_they_fit(memories: tuple[str, ...]) -> None:
    draft = draft_on(*memories)
    found, loads = PartitionMetis().plan(draft), Loads(draft)
    assert len(found["stages"]) >= 2
    for device in range(2):
        own = [s for s, d in zip(found["stages"], found["planned_for"]) if d == device]
        assert loads.fits(indices(draft, own), device)


def test_one_device_more_devices_than_blocks_and_too_large_a_block() -> None:
    assert PartitionMetis().plan(draft_on("10MB"))["planned_for"] == [0]
    many = PartitionMetis().plan(draft_on(*["10MB"] * 5, depth=1))
    assert [name for names in many["stages"] for name in names] == ["layers.0", "head"]
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone .* need .* on cpu0, which has 19.5 KiB"):
        PartitionMetis().plan(draft_on("20kB"))


def test_inputs_of_too_many_stages_are_said() -> None:
    """Each stage fits, but not beside the inputs of all micro-batches of all the others."""
    draft = draft_of(chain(depth=8, width=32, rows=16), Hardware.cpu(num_devices=1, memory="110kB"), micro_batches=8)
    with pytest.raises(DoesNotFit, match=r"partition-metis: .* other stages need") as raised:
        PartitionMetis().plan(apply(draft, Coarsen()))
    assert raised.value.missing_bytes > 0 and raised.value.memory == "cpu0"
