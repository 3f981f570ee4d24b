"""torch's view of a plan's layout is where groups read their members."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from penstock.ir import ops
from penstock.ir.program import Interface, bound_interface, group_name
from penstock.runtime.device.peers import group_members


def device_mesh(interface: Interface, device: int = 0, kind: str = "cpu") -> DeviceMesh:
    """torch's view of the layout, as `device` of the machine sees it: dimensions "replica", "shard" and "pipeline". The
    members of `ops.MESH_GROUPS` are its rows. No process group is made, not even the default one: a `PeerLink` makes
    those that the plan needs.

    With teams there is a dimension "team", in place of "shard" where the same lanes share stages or none do; else the
    larger groups are made of the smaller ones, and come before them, or "shard" goes across teams."""
    lanes = interface.lanes or (tuple(range(interface.num_devices)),)
    rows, shards, team = torch.tensor(lanes), interface.shards, interface.team
    names: tuple[str, ...] = ("replica", "shard", "pipeline")
    if team == 1:
        rows = rows.view(-1, shards, interface.num_devices)
    elif interface.divided and shards > 1:
        rows = rows.view(-1, shards, team, interface.num_devices)
        names = ("replica", "shard", "team", "pipeline")
    elif shards in (1, team):
        rows, names = rows.view(-1, team, interface.num_devices), ("replica", "team", "pipeline")
    else:
        most, least = max(shards, team), min(shards, team)
        rows = rows.view(-1, most // least, least, interface.num_devices)
        names = ("replica", *(("shard", "team") if shards > team else ("team", "shard")), "pipeline")
    return DeviceMesh(kind, rows, mesh_dim_names=names, _init_backend=False, _rank=device)


@settings(max_examples=25, deadline=None)
@given(replicas=st.integers(1, 3), shards=st.integers(1, 3), depth=st.integers(1, 3), seed=st.integers(0, 9))
def test_groups_are_rows_of_the_mesh(replicas: int, shards: int, depth: int, seed: int) -> None:
    count = replicas * shards * depth
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).view(-1, depth).tolist()
    interface = Interface({}, {}, depth, lanes=tuple(tuple(lane) for lane in order), shards=shards)
    members = group_members(bound_interface(interface).groups)
    for lane, devices in enumerate(order):
        for role, device in enumerate(devices):
            mesh = device_mesh(interface, device)
            assert mesh.mesh_dim_names == ("replica", "shard", "pipeline")
            assert list(mesh.get_coordinate() or ()) == [lane // shards, lane % shards, role]
            replica, place, _ = mesh.get_coordinate() or ()
            assert members[group_name(interface, lane, role, ops.SHARDS)] == mesh.mesh[replica, :, role].tolist()
            assert members[group_name(interface, lane, role, ops.REPLICAS)] == mesh.mesh[:, place, role].tolist()
    assert not dist.is_initialized()


def test_one_lane_is_a_pipeline() -> None:
    assert device_mesh(Interface({}, {}, 3)).mesh.tolist() == [[[0, 1, 2]]]
