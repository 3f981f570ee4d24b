"""`partition-pipedream`: no contiguous stages have a faster slowest unit."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.partition_pipedream import PartitionPipedream
from penstock.passes.partition.slices import Slices
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, chain, draft_of, trace_case


def machine(speeds: list[float], memories: list[str], link: str | None = None) -> Hardware:
    document = Hardware.cpu(num_devices=len(speeds), link=link).model_dump(mode="json")
    for device, speed, memory in zip(document["devices"], speeds, memories):
        device |= {"memory_bytes": memory, "op_overhead_s": 1e-5 / speed}
    return Hardware.model_validate(document)


def bottleneck_s(draft: Draft, cuts: list[int], devices: list[int]) -> float:
    """Of these stages on these devices; infinite where one does not fit."""
    slices, loads, count = Slices(draft), Loads(draft), draft.lane_hardware.num_devices
    if not all(slices.fits(a, b, d, count) for (a, b), d in zip(pairwise(cuts), devices)):
        return float("inf")
    crossing = loads.crossing_bytes()
    sent = [loads.message_s(p, q, crossing[cut]) for cut, (p, q) in zip(cuts[1:], pairwise(devices))]
    return max([slices.stage_time_s(a, b, d) for (a, b), d in zip(pairwise(cuts), devices)] + sent)


CASES = {
    "equal": machine([1, 1, 1], ["10MB"] * 3),
    "unequal": machine([3, 1, 2], ["10MB", "10MB", "10MB"]),
    "a tight device": machine([1, 1, 1], ["90kB", "10MB", "10MB"]),
    "slow links": machine([1, 1, 1], ["10MB"] * 3, link="200kB/s"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", ["chain", pytest.param("t5", marks=pytest.mark.slow)])
def test_nothing_contiguous_is_better(name: str, model: str) -> None:
    """Against all cuts on all devices in turn, passing over any."""
    graph = chain(depth=7, width=32) if model == "chain" else trace_case("t5")[0]
    draft = apply(draft_of(graph, CASES[name], micro_batches=2), Coarsen())
    order, length = [block.name for block in draft.blocks], len(draft.blocks)
    found = PartitionPipedream().plan(draft)
    ends = [order.index(names[-1]) + 1 for names in found["stages"]]
    best = min(
        bottleneck_s(draft, [0, *inner, length], list(devices))
        for count in (1, 2, 3)
        for devices in combinations(range(3), count)
        for inner in combinations(range(1, length), count - 1)
    )
    assert bottleneck_s(draft, [0, *ends], found["planned_for"]) == pytest.approx(best, rel=1e-9)


def test_slow_links_are_not_crossed() -> None:
    draft = apply(draft_of(chain(depth=7, width=32), machine([1, 1], ["10MB"] * 2, link="1kB/s")), Coarsen())
    assert PartitionPipedream().plan(draft)["planned_for"] == [0]


def test_devices_come_again_where_a_stage_each_does_not_fit() -> None:
    draft = draft_of(chain(depth=7, width=32), machine([1, 1], ["90kB"] * 2), micro_batches=2)
    found = PartitionPipedream().plan(apply(draft, Coarsen()))
    assert found["planned_for"] == [j % 2 for j in range(len(found["stages"]))] and len(found["stages"]) > 2


def test_as_many_stages_as_asked() -> None:
    draft = apply(draft_of(chain(), Hardware.cpu(num_devices=2)), Coarsen())
    assert PartitionPipedream(stages=3).plan(draft)["planned_for"] == [0, 1, 0]
    assert len(PartitionPipedream(stages=5).plan(draft)["stages"]) == 5
    with pytest.raises(PassError, match="stages=9, but 5 blocks allow at most 5"):
        PartitionPipedream(stages=9).plan(draft)


def test_more_devices_than_blocks_and_one_device() -> None:
    many = apply(draft_of(chain(depth=1), Hardware.cpu(num_devices=4)), Coarsen())
    assert len(PartitionPipedream().plan(many)["stages"]) <= 2
    one = apply(draft_of(chain(), Hardware.cpu(num_devices=1)), Coarsen())
    assert PartitionPipedream().plan(one)["planned_for"] == [0]


def test_what_does_not_fit_is_said() -> None:
    draft = apply(draft_of(chain(width=32), Hardware.cpu(num_devices=2, memory="20kB")), Coarsen())
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone needs"):
        PartitionPipedream().plan(draft)
    draft = apply(draft_of(chain(depth=7, width=32), Hardware.cpu(num_devices=2, memory="90kB")), Coarsen())
    with pytest.raises(DoesNotFit, match="no contiguous partition into 2 stages fits"):
        PartitionPipedream(stages=2).plan(draft)
