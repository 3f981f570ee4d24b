"""The repetition along a fleet: the lanes that stand for all others, and the links that lanes have in the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ...ir.machine.hardware import Hardware
from ...ir.machine.racks import racks_of_lane
from ...ir.program.lanes import NUMBERED


def repeating_lanes(hardware: Hardware, lanes: Sequence[Sequence[int]], together: int) -> int:
    """The number of lanes, from the first on, after which the machine begins anew: shifted by the hosts of these lanes,
    all other lanes, their groups, hosts, devices and racks are where the first ones were. All lanes if nothing repeats.
    `together`: the number of lanes, one after the other, of the larger of shards and teams."""
    count, num_hosts, depth = hardware.num_devices, len(hardware.hosts), len(lanes[0])
    here = count // num_hosts
    rows, places = np.array(lanes), np.arange(count)
    if count % num_hosts or rows.size != count or any(d.host != i // here for i, d in enumerate(hardware.devices)):
        return len(lanes)
    period = math.lcm(depth * together, here) // here
    racks = np.array(hardware.racks)
    if racks.size:
        period = math.lcm(period, int((racks == racks[0]).sum()))
    if num_hosts % period or period == num_hosts:
        return len(lanes)
    shift = period * here
    looks = np.array([(hardware.device_kinds[i], d.root_complex) for i, d in enumerate(hardware.devices)])
    own = shift // depth
    repeats = (
        (looks[shift:] == looks[:-shift]).all()
        and hardware.host_kinds[period:] == hardware.host_kinds[:-period]
        and (not racks.size or len(set(racks[period:] - racks[:-period])) == 1)
        and (rows[own:] - rows[:-own] == shift).all()
        and (np.sort(rows[:own], axis=None) == places[:shift]).all()
    )
    return own if repeats else len(lanes)


def links_alike(
    hardware: Hardware, lanes: Sequence[Sequence[int]], links: Iterable[str], of: Sequence[Sequence[int]]
) -> dict[str, set[str]]:
    """For each link of the first lane's part of a machine (`slice_of`, which numbers hosts, racks and root complexes
    anew), the links of the whole machine that the lanes `of` have in its place."""
    role_of = {hardware.devices[index].name: role for role, index in enumerate(lanes[0])}
    racks = racks_of_lane(hardware, lanes)
    found: dict[str, set[str]] = {link: set() for link in links}
    for lane in of:
        own = [hardware.devices[index] for index in lane]
        hosts = list(dict.fromkeys(device.host for device in own))
        complexes = {host: list(dict.fromkeys(d.root_complex for d in own if d.host == host)) for host in hosts}
        for link, alike in found.items():
            owner, _, rest = link.partition(".")
            if owner in role_of:
                alike.add(f"{own[role_of[owner]].name}.{rest}")
                continue
            match = NUMBERED.fullmatch(link)
            assert match is not None, f"link {link} is neither a device's nor a host's"
            kind, number, part = match["kind"], int(match["host"]), match["complex"]
            if kind == "rack":
                assert racks is not None
                alike.add(f"rack{hardware.racks[hosts[racks.rack_of_host.index(number)]]}{match['rest']}")
                continue
            host = hosts[number]
            if part is not None and kind == "rc":
                part = str(complexes[host][int(part)])
            alike.add(f"{kind}{host}{'' if part is None else '.' + part}{match['rest']}")
    return found
