"""torch's view of a plan's layout is where groups read their members."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.program import Interface, bound_interface, device_mesh, group_name
from penstock.runtime.device.peers import group_members


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
