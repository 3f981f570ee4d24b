"""Lanes: bound, sliced, simulated and verified for one as for all."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import WORLD, Interface, bind, bound_interface, members_of, slice_of
from penstock.ir.verify import verify
from penstock.passes.decisions import Lanes, regular_lanes
from penstock.passes.draft import Draft
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import apply, chain, draft_of
from penstock.tests.runtime.device.test_device_mesh import device_mesh
from penstock.tests.shown_elsewhere import slow_rows_but

PIPELINE = "partition-balanced{stages=%d}, map-round-robin, schedule-1f1b, insert-remat"
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]  # shards, depth


def make_draft(shards: int, depth: int, hardware: Hardware, nearest: str = "shards", micro_batches: int = 8) -> Draft:
    end = "insert-shard, insert-two-hop" if shards > 1 else "insert-fetch"
    line = f"coarsen, mesh{{shards={shards}, depth={depth}, nearest={nearest}}}, {PIPELINE % min(4, 2 * depth)}, {end}"
    draft = draft_of(chain(depth=6, width=64), hardware, micro_batches=micro_batches)
    return apply(draft, *parse_pipeline(f"{line}, insert-optimizer", hardware.num_devices), memory=True)


@pytest.mark.parametrize("nearest", ["shards", "pipeline"])
@pytest.mark.parametrize(("shards", "depth"), slow_rows_but([(1, 2), (2, 2), (4, 1)], LAYOUTS))
def test_groups_of_bound_programs_part_the_devices(shards: int, depth: int, nearest: str) -> None:
    """Every device is in one group of each kind; micro-batches are shared out whole."""
    draft = make_draft(shards, depth, Hardware.cpu(num_devices=8, hosts=2, network="1GB/s"), nearest)
    programs = bind(draft.programs)
    interface = programs[0].interface
    assert [program.device for program in programs] == list(range(8)) and not interface.lanes
    for kind in ("shards", "replicas"):
        groups = [[device for device, _, _ in rows] for name, rows in interface.groups.items() if name.startswith(kind)]
        assert sorted(device for group in groups for device in group) == list(range(8))
        assert {len(group) for group in groups} == {shards if kind == "shards" else 8 // shards // depth}
    loaded = [node.kwargs["micro_batch"] for p in programs for node in p.ops() if node.target.name == "backward"]  # type: ignore[union-attr]
    assert set(loaded) == set(range(8))
    verify(programs, draft.machine)


@pytest.mark.parametrize(("shards", "depth"), slow_rows_but([(2, 2), (4, 1), (1, 4)], LAYOUTS))
def test_a_lane_on_its_part_takes_as_long_as_all(shards: int, depth: int) -> None:
    """Two hosts of four equal GPUs."""
    document = Hardware.preset("mics-p3dn:2").model_dump()
    kept = [device for device in document["devices"] if int(device["name"].removeprefix("gpu")) % 8 < 4]
    hardware = Hardware.model_validate({**document, "devices": kept})
    draft = make_draft(shards, depth, hardware)
    whole_s = simulate(draft.programs, hardware).step_s
    assert simulate(draft.programs, hardware, written_out=0).step_s == pytest.approx(whole_s, rel=0.02)


def test_a_lane_is_accepted_where_all_are() -> None:
    """Small plans of lanes, each with one op dropped: the verifier says the same of the lane as of what is bound."""
    draw, refused = random.Random(0), 0
    for shards, depth in LAYOUTS * 3:
        draft = make_draft(shards, depth, Hardware.cpu(num_devices=4), micro_batches=4)
        lane = [program.copy() for program in draft.programs]
        victim = draw.choice(lane)
        nodes = [node for node in victim.ops() if not node.users]
        if nodes:
            victim.graph.erase_node(draw.choice(nodes))
        found = [accepts(lane, draft.lane_hardware), accepts(bind(lane), draft.machine)]
        assert found[0] == found[1], (shards, depth)
        refused += not found[0]
    assert refused


def accepts(programs: Any, hardware: Hardware) -> bool:
    try:
        verify(programs, hardware)
    except VerifyError:
        return False
    return True


def test_a_lane_has_its_part_of_everything_shared() -> None:
    hardware = Hardware.preset("mics-p4d:64")
    own = slice_of(hardware, regular_lanes(512, shards=8, depth=1))
    whole = hardware.hosts[0]
    assert own.num_devices == 1 and own.hosts[0].dram_bytes == whole.dram_bytes // 8
    assert own.hosts[0].root_complexes[0].bandwidth_up == whole.root_complexes[0].bandwidth_up / 2
    deep = slice_of(hardware, regular_lanes(512, shards=1, depth=8))
    assert deep.num_devices == 8 and deep.hosts[0].dram_bytes == whole.dram_bytes


def test_shards_of_members_go_across_teams() -> None:
    """Of 16 devices in lanes of one, teams of two that have parts of weights, and two teams that share these."""
    interface = Interface({}, {}, 1, 4, lanes=tuple((device,) for device in range(16)), shards=2, team=2, divided=True)
    groups = bound_interface(interface).groups
    found: dict[str, list[list[int]]] = {kind: [] for kind in ("shards", "replicas", "team")}
    for name, rows in groups.items():
        found[name.partition(".")[0]].append([device for device, _, _ in rows])
    assert found["team"] == [[first, first + 1] for first in range(0, 16, 2)]
    assert sorted(found["shards"]) == sorted([n, n + 2] for first in range(0, 16, 4) for n in (first, first + 1))
    assert sorted(found["replicas"]) == [list(range(place, 16, 4)) for place in range(4)]
    assert members_of(interface, 5, 0, WORLD) == [4, 5, 6, 7]
    sizes = dict(zip(*(getattr(device_mesh(interface), name) for name in ("mesh_dim_names", "shape"))))
    assert sizes == {"replica": 4, "shard": 2, "team": 2, "pipeline": 1}


def test_crossed_lanes_are_saved_short() -> None:
    lanes = Lanes(lanes=regular_lanes(16, 4, 2), shards=2, team=2, crossed=True)
    assert Lanes.model_validate_json(lanes.model_dump_json()) == lanes and '"devices":16' in lanes.model_dump_json()
    assert lanes.describe() == "16 devices: 2 replicas of 2 shards of 2 lanes that are a team of pipelines of 2"
