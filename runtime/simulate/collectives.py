"""How a collective goes round: which members send how much to which others, stage by stage.

- A ring has its members host by host, so that what passes from host to host does so once. In each of its rounds every
  member sends a part to the next: of a gather or a scatter of M bytes over n members n-1 rounds of M/n bytes, of a sum
  that all get twice as many (a scatter and a gather). A round takes at least the latency of the slowest hop, which is
  the term p alpha (2 p alpha for a sum) of MiCS 2.3: so small messages over many members leave links idle.
- Between hosts with several root complexes there are as many rings side by side, each with an equal share of the bytes
  and another member at the border of a host: all network cards that stand behind one rate are in use.
- A hierarchical gather (MiCS 3.3) has three stages: members of the same place in their hosts gather among themselves,
  all places at the same time; each puts the pieces in order; and the hosts' own members gather what is then there, the
  batch of all hosts' pieces at once. (p-k) M / p bytes go between hosts, k the members of one, not (p-1) M / p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.machine.hardware import Hardware


@dataclass(frozen=True)
class Round:
    """`hops`: from device to device so many bytes, all at the same time, in `rounds` rounds; `copied_bytes`: read and
    written by each device in its own memory before."""

    hops: dict[tuple[int, int], float]
    rounds: int
    copied_bytes: float = 0.0


def by_host(devices: Sequence[int], hardware: Hardware) -> list[list[int]]:
    """The devices of each host, hosts and devices in order."""
    found: dict[int, list[int]] = {}
    for device in sorted(devices):
        found.setdefault(hardware.devices[device].host, []).append(device)
    return [found[host] for host in sorted(found)]


def stages(
    devices: Sequence[int], hardware: Hardware, moved_bytes: float, times: int, hierarchical: bool = False
) -> list[Round]:
    """Of a collective over a whole value of `moved_bytes`: `times` 1 for a gather or a scatter, 2 for a sum that all
    get. A hierarchical one over a single host, or hosts with one or unequally many members, is a plain ring."""
    hosts = by_host(devices, hardware)
    sizes = {len(members) for members in hosts}
    if hierarchical and len(hosts) > 1 and len(sizes) == 1 and sizes != {1}:
        return _hierarchical(hosts, moved_bytes, times)
    return [_ring(hosts, hardware, moved_bytes, times)]


def _ring(hosts: Sequence[Sequence[int]], hardware: Hardware, moved_bytes: float, times: int) -> Round:
    count = sum(len(members) for members in hosts)
    side_by_side = _rings_between(hosts, hardware)
    each_bytes = times * (count - 1) / count * moved_bytes / side_by_side
    hops: dict[tuple[int, int], float] = {}
    for number in range(side_by_side):
        order = [device for members in hosts for device in _turned(members, number, side_by_side)]
        _add_ring(hops, order, each_bytes)
    return Round(hops, times * (count - 1))


def _rings_between(hosts: Sequence[Sequence[int]], hardware: Hardware) -> int:
    if len(hosts) == 1:
        return 1
    return min(len({hardware.devices[device].root_complex for device in members}) for members in hosts)


def _turned(members: Sequence[int], number: int, of: int) -> list[int]:
    first = number * len(members) // of
    return [*members[first:], *members[:first]]


def _hierarchical(hosts: Sequence[Sequence[int]], moved_bytes: float, times: int) -> list[Round]:
    local = len(hosts[0])
    between: dict[tuple[int, int], float] = {}
    inside: dict[tuple[int, int], float] = {}
    for same_place in zip(*hosts, strict=True):
        _add_ring(between, same_place, times * (len(hosts) - 1) / len(hosts) * moved_bytes / local)
    for members in hosts:
        _add_ring(inside, members, times * (local - 1) / local * moved_bytes)
    in_order_bytes = 2.0 * times * moved_bytes / local
    return [Round(between, times * (len(hosts) - 1)), Round(inside, times * (local - 1), in_order_bytes)]


def _add_ring(hops: dict[tuple[int, int], float], order: Sequence[int], num_bytes: float) -> None:
    for i, device in enumerate(order):
        hop = (order[i - 1], device)
        hops[hop] = hops.get(hop, 0.0) + num_bytes
