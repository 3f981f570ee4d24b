"""Lanes that stand for all others, and racks: one lane, simulated for all, takes as long as all."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import slice_of
from penstock.passes.decisions import regular_lanes
from penstock.runtime.simulate import costs, simulate
from penstock.runtime.simulate.symmetry import links_alike, repeating_lanes
from penstock.tests.ir.program.test_lanes import make_draft


def put_in_racks(num_hosts: int, each: int, **racks: Any) -> Hardware:
    """Hosts of `each` equal GPUs in racks."""
    document = Hardware.preset(f"mics-p3dn:{num_hosts}").model_dump()
    kept = [device for device in document["devices"] if int(device["name"].removeprefix("gpu")) % 8 < each]
    network = {"bandwidth": "10GB/s", "latency_s": "30us", "racks": racks or None}
    return Hardware.model_validate({**document, "devices": kept, "network": network})


@pytest.mark.parametrize(
    ("shards", "depth", "each", "racks", "lanes"),
    [
        (8, 1, 8, {}, 8),  # a group in each host, all hosts alike
        (16, 1, 8, {}, 16),
        (2, 2, 8, {}, 4),
        (8, 1, 8, {"hosts_per_rack": 4, "oversubscription": 2}, 32),
        (16, 1, 4, {"hosts_per_rack": 3, "oversubscription": 2}, 48),  # groups of four hosts, and racks of three
        (64, 2, 8, {}, 64),  # nothing repeats: these are all lanes
        (8, 1, 8, {"hosts_per_rack": 5, "oversubscription": 2}, 128),
        (1, 4, 8, {"rack_of_host": [0] * 12 + [1] * 4, "uplink_bandwidth": "1GB/s"}, 32),
    ],
)
def test_lanes_that_repeat(shards: int, depth: int, each: int, racks: dict[str, Any], lanes: int) -> None:
    hardware = put_in_racks(16 if racks.get("hosts_per_rack") != 3 else 24, each, **racks)
    rows = regular_lanes(hardware.num_devices, shards, depth)
    assert repeating_lanes(hardware, rows, shards) == lanes


def test_a_machine_that_is_irregular_does_not_repeat() -> None:
    document = put_in_racks(8, 4).model_dump()
    document["devices"][9]["memory_bytes"] //= 2
    other = Hardware.model_validate(document)
    assert repeating_lanes(other, regular_lanes(32, 4, 1), 4) == 32
    assert repeating_lanes(put_in_racks(8, 4), [[i] for i in [1, 0, *range(2, 32)]], 4) == 32


@pytest.mark.parametrize(
    ("shards", "depth", "nearest"),
    [
        (4, 1, "shards"),
        (8, 1, "shards"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 4, "shards"), (4, 2, "pipeline"))),
        (32, 1, "shards"),
    ],
)
def test_lanes_that_stand_for_all_cost_what_all_cost(
    shards: int, depth: int, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for racks in ({}, {"hosts_per_rack": 2, "oversubscription": 4}):
        draft = make_draft(shards, depth, put_in_racks(8, 4, **racks), nearest, micro_batches=32)
        few_s = simulate(draft.programs, draft.machine).step_s
        with monkeypatch.context() as patch:
            patch.setattr(costs, "repeating_lanes", lambda hardware, lanes, shards: len(lanes))
            assert simulate(draft.programs, draft.machine).step_s == pytest.approx(few_s, rel=1e-9)


@pytest.mark.parametrize(
    ("shards", "depth"), [(4, 1), (1, 4), *(pytest.param(2, depth, marks=pytest.mark.slow) for depth in (2, 4))]
)
def test_racks_slow_a_lane_as_they_slow_all(shards: int, depth: int) -> None:
    """Four hosts of two GPUs in racks of two: written out, and one lane for all. A narrow uplink costs time."""
    seconds = {}
    for over in (1, 100_000):
        hardware = put_in_racks(4, 2, hosts_per_rack=2, oversubscription=over)
        draft = make_draft(shards, depth, hardware)
        seconds[over] = simulate(draft.programs, hardware).step_s
        lane_s = simulate(draft.programs, hardware, written_out=0).step_s
        assert lane_s == pytest.approx(seconds[over], rel=0.02)
    without = make_draft(shards, depth, put_in_racks(4, 2))
    assert seconds[1] == pytest.approx(simulate(without.programs, without.machine).step_s)
    assert seconds[100_000] > 1.2 * seconds[1]


def test_a_lane_in_several_racks_stands_for_those_in_one() -> None:
    """Pipelines of two hosts, racks of three: the first lane is in one rack, the second in two."""
    hardware = put_in_racks(12, 4, hosts_per_rack=3, uplink_bandwidth="6GB/s")
    lanes = regular_lanes(48, 1, 8)
    part = slice_of(hardware, lanes)
    assert part.racks == [0, 1]
    # A lane has 4 of the 12 devices of a rack, and so a third of its uplink.
    assert part.links()["rack0.up"].bandwidth == pytest.approx(2e9)
    alike = links_alike(hardware, lanes, ["rack0.up", "rack1.up", "nic1.down"], lanes)
    assert alike == {
        "rack0.up": {"rack0.up", "rack1.up", "rack2.up", "rack3.up"},
        "rack1.up": {"rack0.up", "rack1.up", "rack2.up", "rack3.up"},
        "nic1.down": {f"nic{host}.down" for host in range(1, 12, 2)},
    }
