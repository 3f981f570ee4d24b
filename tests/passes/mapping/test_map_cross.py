"""`map-cross`: no exchange of equal devices has less contention, and unequal ones keep their stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_cross import MapCross, complexes, cross_order
from penstock.passes.mapping.mapping import equal_devices
from penstock.tests.passes.running import chain


def machine(topology: Sequence[int], fast: Sequence[int] = ()) -> Hardware:
    """`topology[r]` devices under root complex r; those of `fast` have more memory."""
    document = Hardware.preset("mobius-topo4").model_dump()
    host, (device, *_) = document["hosts"][0], document["devices"]
    host["root_complexes"] *= len(topology)
    homes = [r for r, n in enumerate(topology) for _ in range(n)]
    document["devices"] = [
        device | {"name": f"gpu{i}", "root_complex": r, "memory_bytes": device["memory_bytes"] * (1 + (i in fast))}
        for i, r in enumerate(homes)
    ]
    return Hardware.model_validate(document)


def contention(hardware: Hardware, devices: Sequence[int]) -> float:
    """The contention (eq. 13) of stages on these devices."""
    homes = complexes(hardware)
    shared = Counter(homes)
    placed = [homes[device] for device in devices]
    return sum(shared[a] / (j - i) for j, a in enumerate(placed) for i in range(j) if placed[i] == a)


def draft_for(hardware: Hardware, planned_for: Sequence[int]) -> Draft:
    return Draft(chain(), hardware, Options(), planned_for=list(planned_for))


def in_turn(order: Sequence[int], num_stages: int) -> list[int]:
    return [order[j % len(order)] for j in range(num_stages)]


@st.composite
def machines(draw: st.DrawFn, most: int = 7) -> Hardware:
    topology = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda t: sum(t) <= most))
    return machine(topology, fast=draw(st.sets(st.integers(0, sum(topology) - 1))))


@settings(max_examples=40, deadline=None)
@given(machines(), st.integers(1, 20))
def test_no_other_order_has_less_contention(hardware: Hardware, num_stages: int) -> None:
    every = permutations(range(hardware.num_devices))
    least = min(contention(hardware, in_turn(order, num_stages)) for order in every)
    order = cross_order(hardware, num_stages)
    assert sorted(order) == list(range(hardware.num_devices))
    assert contention(hardware, in_turn(order, num_stages)) == pytest.approx(least, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(machines(most=6), st.data())
def test_no_other_exchange_of_equal_devices_has_less_contention(hardware: Hardware, data: st.DataObject) -> None:
    """Whatever the stages were cut for: devices in any order, some with several stages, some with none."""
    count = hardware.num_devices
    planned = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    devices = MapCross().plan(draft_for(hardware, planned))
    group_of = {d: g for g, group in enumerate(equal_devices(hardware)) for d in group}
    every = [p for p in permutations(range(count)) if all(group_of[p[d]] == group_of[d] for d in range(count))]
    least = min(contention(hardware, [p[d] for d in planned]) for p in every)
    assert contention(hardware, devices) == pytest.approx(least, rel=1e-6)
    assert [group_of[d] for d in devices] == [group_of[d] for d in planned]
    assert len(set(zip(planned, devices))) == len(set(planned)) == len(set(devices))


def test_eight_devices_of_all_orders() -> None:
    """4 + 4, against every word of root complexes (devices under one complex are alike)."""
    hardware = machine([4, 4])
    words = {word for word in permutations([0] * 4 + [1] * 4)}
    costs = []
    for word in words:
        free = {0: iter(range(4)), 1: iter(range(4, 8))}
        costs.append(contention(hardware, in_turn([next(free[r]) for r in word], 19)))
    assert contention(hardware, in_turn(cross_order(hardware, 19), 19)) == pytest.approx(min(costs))


@pytest.mark.parametrize(
    ("topology", "order"),
    [
        ([4], [0, 1, 2, 3]),  # nothing to gain: as they are
        ([2, 2], [0, 2, 1, 3]),  # figure 4b
        ([4, 4], [0, 4, 1, 5, 2, 6, 3, 7]),
        ([2, 2, 2, 2], [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_neighbours_are_under_different_complexes(topology: list[int], order: list[int]) -> None:
    assert cross_order(machine(topology), 2 * sum(topology)) == order


def test_hosts_do_not_mix() -> None:
    """A stage's neighbours stay on its host: the network is slower than any root complex."""
    hardware = Hardware.preset("mics-p4d:2")
    hosts = [hardware.devices[d].host for d in cross_order(hardware, 32)]
    assert hosts == sorted(hosts)


def test_the_deadline_is_kept_and_said() -> None:
    """At once it still gives the most even interleaving."""
    hardware = machine([8, 8, 8, 8])
    draft = draft_for(hardware, range(32))
    devices = MapCross(deadline_s=0.0).plan(draft)
    homes = [hardware.devices[d].root_complex for d in devices]
    assert homes == [0, 1, 2, 3] * 8
    assert draft.notes == {"map-cross": "the best mapping found in 0 s; there may be a better one"}
