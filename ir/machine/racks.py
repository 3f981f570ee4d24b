"""Racks: groups of hosts, and the uplink that they share to the hosts of other racks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from .part import MachinePart, Rate, Seconds

if TYPE_CHECKING:
    from .hardware import Hardware


class Racks(MachinePart):
    """The racks of a network's hosts. All of them have equal uplinks, which what goes between racks passes.

    `hosts_per_rack` puts the hosts into racks in their order, the last of which may have fewer; `rack_of_host` has a
    number for each host instead. `uplink_bandwidth` is per rack and direction; `oversubscription` says it by how often
    the rates of a full rack's hosts together are that much: 1 if all of them may send to other racks at their full
    rate. `latency_s` is what an empty message between racks takes longer.
    """

    hosts_per_rack: Annotated[int, Field(gt=0)] | None = None
    rack_of_host: list[Annotated[int, Field(ge=0)]] = []
    uplink_bandwidth: Rate | None = None
    oversubscription: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    latency_s: Seconds = 0.0

    @model_validator(mode="after")
    def _say_each_once(self) -> Racks:
        pairs: tuple[tuple[str, Any, str, Any], ...] = (
            ("hosts_per_rack", self.hosts_per_rack, "rack_of_host", self.rack_of_host or None),
            ("uplink_bandwidth", self.uplink_bandwidth, "oversubscription", self.oversubscription),
        )
        for one, first, other, second in pairs:
            if (first is None) == (second is None):
                found = "neither" if first is None else "both"
                raise ValueError(f"one of {one} and {other}; this has {found}")
        return self

    def racks_of(self, num_hosts: int) -> list[int]:
        if self.hosts_per_rack is None:
            return list(self.rack_of_host)
        return [host // self.hosts_per_rack for host in range(num_hosts)]

    def uplink(self, num_hosts: int, host_bandwidth: float) -> float:
        """Bytes/s of a rack's uplink, per direction."""
        if self.uplink_bandwidth is not None:
            return self.uplink_bandwidth
        assert self.oversubscription is not None
        fullest = max(Counter(self.racks_of(num_hosts)).values())
        return (self.hosts_per_rack or fullest) * host_bandwidth / self.oversubscription


def racks_of_lane(hardware: Hardware, lanes: Sequence[Sequence[int]]) -> Racks | None:
    """The racks of a lane's part of a machine: those of the lane that is in the most racks, so that no lane takes
    longer, with its part of their uplinks by the number of devices; None where the machine has none."""
    network = hardware.network
    if network is None or network.racks is None:
        return None
    rack_of, host_of = hardware.racks, [device.host for device in hardware.devices]
    below = Counter(rack_of[host_of[index]] for lane in lanes for index in lane)
    num_hosts = len({host_of[index] for index in lanes[0]})
    best: tuple[int, float, list[int]] | None = None
    for lane in lanes:
        hosts = list(dict.fromkeys(host_of[index] for index in lane))
        if len(hosts) != num_hosts:
            continue
        own = Counter(rack_of[host_of[index]] for index in lane)
        numbers = {rack: number for number, rack in enumerate(dict.fromkeys(rack_of[host] for host in hosts))}
        row = (len(own), -min(count / below[rack] for rack, count in own.items()))
        if best is None or row > best[:2]:
            best = (*row, [numbers[rack_of[host]] for host in hosts])
    assert best is not None  # the first lane is one of them
    _, share, pattern = best
    uplink = network.racks.uplink(len(hardware.hosts), network.bandwidth)
    return Racks(rack_of_host=pattern, uplink_bandwidth=-share * uplink, latency_s=network.racks.latency_s)
