"""The hops of a collective: how many bytes each member sends to which other member, in which rounds.

- A ring has its members host by host, so that each part passes from host to host once. In each round every member sends
  a part to the next member. A gather or a scatter of M bytes over n members has n-1 rounds of M/n bytes; an all-reduce
  has twice the number (a scatter and a gather). A round takes at least the latency of the slowest hop, which is the
  term p alpha (2 p alpha for an all-reduce) of MiCS 2.3: so small messages over many members leave links idle.
- Over many hosts GPUs add up in two binary trees of the hosts, each with half of the bytes, down which the sums come
  back; NCCL chooses what takes fewer rounds, and so do we. A leaf of one tree is an inner host of the other, so that a
  host sends the bytes that it sends in a ring, and neighbours in the order of hosts are neighbours in the trees: links
  carry the same bytes. Parts take the latency of a hop to pass it, so that each hop of depth counts as two rounds.
- Between hosts with several root complexes there is one ring for each root complex, side by side. Each has an equal
  share of the bytes and another member at the border of a host, so that all network cards of a host are in use.
- In a hierarchical gather (MiCS 3.3) the members with the same place in their hosts gather among themselves first, all
  places at the same time; then the members of each host gather these pieces, those of all hosts at once. Every piece
  arrives where it stays, so that nothing is put in order between the two. With k members per host, (p-k) M / p bytes go
  between hosts, not (p-1) M / p.
- An all-to-all of M bytes per member sends M/n from each member to each other one, in n-1 rounds; a step of a ring
  sends M to the next member, in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import seats_of


@dataclass(frozen=True)
class Rounds:
    """A run of equal rounds of a collective. `hops` has the bytes from device to device over all of them, which move
    at the same time, in messages of `message_bytes`: what a member passes on in one round of one ring."""

    hops: dict[tuple[int, int], float]
    count: int
    message_bytes: float


def devices_by_host(devices: Sequence[int], hardware: Hardware) -> list[list[int]]:
    """The devices of each host, hosts and devices in order."""
    found: dict[int, list[int]] = {}
    for device in sorted(devices):
        found.setdefault(hardware.devices[device].host, []).append(device)
    return [found[host] for host in sorted(found)]


def rounds_of(
    devices: Sequence[int],
    hardware: Hardware,
    moved_bytes: float,
    times: int,
    hierarchical: bool = False,
    pattern: str = "",
) -> list[Rounds]:
    """The runs of rounds of a collective over a whole value of `moved_bytes`; `times` is 1 for a gather or a scatter, 2
    for an all-reduce. A hierarchical one over a single host, or hosts with one or unequal numbers of members, is a
    plain ring."""
    if pattern:
        return [_steps(list(devices), moved_bytes, pattern)]
    hosts = devices_by_host(devices, hardware)
    if hierarchical and seats_of([hardware.devices[device].host for device in devices], 0).hosts:
        return _hierarchical(hosts, hardware, moved_bytes, times)
    return [_ring(hosts, hardware, moved_bytes, times)]


def _steps(devices: Sequence[int], moved_bytes: float, pattern: str) -> Rounds:
    """Messages of a team: from each member to each other one, or to the next one."""
    count = len(devices)
    if pattern == ops.PAIRS:
        part_bytes = moved_bytes / count
        return Rounds({(a, b): part_bytes for a in devices for b in devices if a != b}, count - 1, part_bytes)
    hops = {(device, devices[(i + 1) % count]): moved_bytes for i, device in enumerate(devices)}
    return Rounds(hops, 1, moved_bytes)


def _ring(hosts: Sequence[Sequence[int]], hardware: Hardware, moved_bytes: float, times: int) -> Rounds:
    count = sum(len(members) for members in hosts)
    side_by_side = _rings_between(hosts, hardware)
    each_bytes = times * (count - 1) / count * moved_bytes / side_by_side
    hops: dict[tuple[int, int], float] = {}
    for number in range(side_by_side):
        order = [device for members in hosts for device in _rotate(members, number, side_by_side)]
        _add_ring(hops, order, each_bytes)
    return Rounds(hops, _count(hosts, hardware, times), moved_bytes / count / side_by_side)


def _count(hosts: Sequence[Sequence[int]], hardware: Hardware, times: int) -> int:
    """The number of rounds: those of a ring, or of trees of the hosts in which the members of a host are a chain."""
    members = [device for host in hosts for device in host]
    ring = times * (len(members) - 1)
    if times == 1 or any(hardware.devices[device].kind != "cuda" for device in members):
        return ring  # gloo adds up in a ring
    depth = math.ceil(math.log2(len(hosts))) + max(map(len, hosts)) - 1
    return min(ring, times * 2 * depth)


def _rings_between(hosts: Sequence[Sequence[int]], hardware: Hardware) -> int:
    if len(hosts) == 1:
        return 1
    return min(len({hardware.devices[device].root_complex for device in members}) for members in hosts)


def _rotate(members: Sequence[int], number: int, of: int) -> list[int]:
    first = number * len(members) // of
    return [*members[first:], *members[:first]]


def _hierarchical(hosts: Sequence[Sequence[int]], hardware: Hardware, moved_bytes: float, times: int) -> list[Rounds]:
    local = len(hosts[0])
    between: dict[tuple[int, int], float] = {}
    inside: dict[tuple[int, int], float] = {}
    part_bytes = moved_bytes / local
    for same_place in zip(*hosts, strict=True):
        _add_ring(between, same_place, times * (len(hosts) - 1) / len(hosts) * part_bytes)
    for members in hosts:
        _add_ring(inside, members, times * (local - 1) * part_bytes)
    return [
        Rounds(between, _count([host[:1] for host in hosts], hardware, times), part_bytes / len(hosts)),
        Rounds(inside, times * (local - 1), part_bytes),
    ]


def _add_ring(hops: dict[tuple[int, int], float], order: Sequence[int], num_bytes: float) -> None:
    for i, device in enumerate(order):
        hop = (order[i - 1], device)
        hops[hop] = hops.get(hop, 0.0) + num_bytes
