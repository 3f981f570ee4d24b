"""`partition-acyclic`: blocks move as long as the busiest device gains, and stages read nothing of a later one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.partition_acyclic import PartitionAcyclic, _Greedy, _start
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition.slices import Slices
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.partition.test_partition_max_stage import draft_on
from penstock.tests.passes.running import apply, chain, draft_of, trace_case, traced_model


class Branches(nn.Module):
    """Branches of 4, 10 and 6 layers from one value: the middle one is as long as the others together."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(n))) for n in (4, 10, 6))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in self.branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        ends = [branch(h) for branch in self.branches]
        return torch.stack([head(end) for head, end in zip(self.heads, ends)]).sum()


def busiest_s(draft: Draft, found: dict[str, list]) -> float:
    """Seconds of blocks on the device that has most."""
    loads, names = Loads(draft), [block.name for block in draft.blocks]
    busy_s = [0.0] * draft.lane_hardware.num_devices
    for stage, device in zip(found["stages"], found["planned_for"]):
        busy_s[device] += sum(loads.time_s[device][names.index(name)] for name in stage)
    return max(busy_s)


def test_stages_need_not_be_runs_of_blocks() -> None:
    graph, _ = traced_model(Branches(), [{"x": torch.randn(2, 4)}])
    document = Hardware.cpu(num_devices=2).model_dump()
    for device in document["devices"]:
        device["op_overhead_s"] = 1e-3  # layers are slower than messages
    draft = apply(draft_of(graph, Hardware.model_validate(document), micro_batches=2), Coarsen())
    found = PartitionAcyclic().plan(draft)
    assert found["stages"][0][:2] == ["inlet", "branches.1"] and found["planned_for"] == [0, 1]
    assert found["stages"][1][:2] == ["branches.0", "branches.2"]
    assert busiest_s(draft, found) < 0.95 * busiest_s(draft, PartitionBalanced().plan(draft))
    apply(draft, PartitionAcyclic())  # builds the stages, which is refused where one reads a later one


@pytest.mark.parametrize("name", ["t5", "gpt2", "wide_resnet", "bert"])
def test_moves_make_the_busiest_device_less_busy(name: str) -> None:
    draft = apply(draft_of(trace_case(name)[0], Hardware.cpu(num_devices=3), micro_batches=2), Coarsen())
    greedy = _Greedy(Loads(draft), 3, _start(Slices(draft), 1))
    before_s = max(greedy.busy_s)
    greedy.improve()
    after = _Greedy(Loads(draft), 3, greedy.turn_of).busy_s
    assert max(after) <= before_s and after == pytest.approx(greedy.busy_s, rel=1e-6)
    edges = [(greedy.turn_of[i], greedy.turn_of[j]) for j, makers in enumerate(greedy.loads.before) for i in makers]
    assert all(first <= second for first, second in edges)


def test_faster_devices_get_more() -> None:
    document = Hardware.cpu(num_devices=2).model_dump()
    document["devices"][1]["op_overhead_s"] /= 3
    draft = apply(draft_of(chain(depth=8), Hardware.model_validate(document)), Coarsen())
    found = PartitionAcyclic().plan(draft)
    assert [len(names) for names in found["stages"]][found["planned_for"].index(1)] >= 6


@pytest.mark.parametrize("memories", [("90kB", "90kB"), ("70kB", "300kB"), ("20kB", "200kB")])
def test_every_device_holds_its_stages(memories: tuple[str, ...]) -> None:
    draft = draft_on(*memories)
    found, loads = PartitionAcyclic().plan(draft), Loads(draft)
    order = [block.name for block in draft.blocks]
    for device in range(2):
        own = [s for s, d in zip(found["stages"], found["planned_for"]) if d == device]
        assert loads.fits([tuple(map(order.index, names)) for names in own], device)


def test_one_device_more_devices_than_blocks_and_too_large_a_block() -> None:
    assert PartitionAcyclic().plan(draft_on("10MB"))["planned_for"] == [0]
    many = PartitionAcyclic().plan(draft_on(*["10MB"] * 5, depth=1))
    assert sorted(name for names in many["stages"] for name in names) == ["head", "layers.0"]
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone needs"):
        PartitionAcyclic().plan(draft_on("20kB"))
