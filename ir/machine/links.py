"""The directed links of a machine, and the links that a transfer occupies.

Memories are named: a device by its own name ("gpu0"), "dram0" the DRAM of host 0, "ssd0.1" the second SSD of
host 0, "ssd0" all SSDs of host 0 striped (its links stand for the whole array: address the array or the single
disks, not both). Every route passes the DRAM of the hosts at its ends, except NVLink, peer-to-peer copies and what
network cards read from GPU memory themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import HardwareError
from .rates import RateCurve
from .shares import share_at

if TYPE_CHECKING:
    import networkx as nx

    from .hardware import Hardware
    from .host import Host


@dataclass(frozen=True)
class Link:
    """One direction of one physical connection, or what both directions share, which begins and ends at one place.

    `simplex` names a medium that several links take turns on (an SSD's reads and writes): the shares
    rate / bandwidth of all links on one medium add up to at most 1. Flows that share a link get rates in proportion to
    their weights: a flow's weight is the product of its links' `weight`, which makes other amounts comparable to bytes.

    Messages reach a share of the rate by their bytes and by the number of hosts that take part (`message_shares`,
    `host_shares`). They move on a link of their own, which is slower by that share and takes turns with the whole
    link, `part_of`.
    """

    name: str
    tail: str
    head: str
    bandwidth: float  # bytes/s
    latency_s: float
    simplex: str | None = None
    weight: float = 1.0
    message_shares: RateCurve | None = None
    host_shares: RateCurve | None = None
    part_of: str | None = None

    def for_messages(self, message_bytes: float, num_hosts: int = 2) -> Link:
        """The link for messages of this size in a collective over `num_hosts` hosts."""
        if self.message_shares is None and self.host_shares is None:
            return self
        return self.with_share(share_at(self.message_shares, message_bytes) * share_at(self.host_shares, num_hosts))

    def with_share(self, share: float) -> Link:
        """The link of flows that reach this share of the rate, in four digits; this one if they reach all of it."""
        share = float(f"{share:.4g}")
        if share >= 1:
            return self
        return replace(
            self,
            name=f"{self.name}@{share:g}",
            bandwidth=share * self.bandwidth,
            simplex=self.simplex or self.name,
            part_of=self.name,
        )


def build_links(hardware: Hardware) -> dict[str, Link]:
    """All links of the machine by name."""
    found: list[Link] = []
    for index, host in enumerate(hardware.hosts):
        for number, complex_ in enumerate(host.root_complexes):
            rc, dram = f"rc{index}.{number}", f"dram{index}"
            found.append(Link(f"{rc}.up", rc, dram, complex_.bandwidth_up, 0.0))
            found.append(Link(f"{rc}.down", dram, rc, complex_.bandwidth_down, 0.0))
            if complex_.bandwidth_both is not None:
                found.append(Link(f"{rc}.both", rc, rc, complex_.bandwidth_both, 0.0))
        found += _ssd_links(index, host)
        if hardware.network is not None:
            network, dram = hardware.network, f"dram{index}"
            switch = f"rack{hardware.racks[index]}" if hardware.racks else "network"
            for name, tail, head in ((f"nic{index}.up", dram, switch), (f"nic{index}.down", switch, dram)):
                link = Link(name, tail, head, network.bandwidth, network.latency_s / 2)
                found.append(replace(link, message_shares=network.message_shares, host_shares=network.host_shares))
    found += _rack_links(hardware)
    for device in hardware.devices:
        rc, host = f"rc{device.host}.{device.root_complex}", hardware.hosts[device.host]
        found.append(Link(f"{device.name}.up", device.name, rc, device.d2h_bandwidth, device.link_latency_s))
        found.append(Link(f"{device.name}.down", rc, device.name, device.h2d_bandwidth, device.link_latency_s))
        if host.nvlink_bandwidth is not None:
            name, switch, latency_s = f"{device.name}.nvlink", f"nvlink{device.host}", host.nvlink_latency_s / 2
            for way, tail, head in (("up", device.name, switch), ("down", switch, device.name)):
                link = Link(f"{name}.{way}", tail, head, host.nvlink_bandwidth, latency_s)
                found.append(replace(link, message_shares=host.nvlink_message_shares))
    return {link.name: link for link in found}


def _rack_links(hardware: Hardware) -> list[Link]:
    """The uplink of each rack, from its hosts to all other racks."""
    network = hardware.network
    if network is None or network.racks is None:
        return []
    rate, half_latency_s = network.racks.uplink(len(hardware.hosts), network.bandwidth), network.racks.latency_s / 2
    found = []
    for rack in sorted(set(hardware.racks)):
        found.append(Link(f"rack{rack}.up", f"rack{rack}", "network", rate, half_latency_s))
        found.append(Link(f"rack{rack}.down", "network", f"rack{rack}", rate, half_latency_s))
    return found


def _ssd_links(index: int, host: Host) -> list[Link]:
    if not host.ssds:
        return []
    hub = f"dram{index}" if host.ssd_uplink_bandwidth is None else f"ssdbus{index}"
    found = []
    for number, ssd in enumerate(host.ssds):
        name = f"ssd{index}.{number}"
        found.append(Link(f"{name}.read", name, hub, ssd.read_bandwidth, ssd.latency_s, simplex=name))
        found.append(Link(f"{name}.write", hub, name, ssd.write_bandwidth, ssd.latency_s, simplex=name))
    array, latency_s = f"ssd{index}", max(ssd.latency_s for ssd in host.ssds)
    read, write = host.ssd_bandwidths
    found.append(Link(f"{array}.read", array, hub, read, latency_s, simplex=array))
    found.append(Link(f"{array}.write", hub, array, write, latency_s, simplex=array))
    if host.ssd_uplink_bandwidth is not None:
        found.append(Link(f"{hub}.up", hub, f"dram{index}", host.ssd_uplink_bandwidth, 0.0))
        found.append(Link(f"{hub}.down", f"dram{index}", hub, host.ssd_uplink_bandwidth, 0.0))
    return found


def find_path(hardware: Hardware, src: str, dst: str) -> list[str]:
    """Names of the links that a transfer from memory `src` to memory `dst` occupies, in order; [] when equal.

    Raises HardwareError when either is not a memory of this machine.
    """
    src_host, dst_host = hardware.host_of(src), hardware.host_of(dst)
    if src == dst:
        return []
    devices = hardware.device_by_name
    if src in devices and dst in devices and src_host == dst_host:
        host = hardware.hosts[src_host]
        if host.nvlink_bandwidth is not None:
            return [f"{src}.nvlink.up", f"{dst}.nvlink.down"]
        if host.p2p and devices[src].root_complex == devices[dst].root_complex:
            return [f"{src}.up", f"{dst}.down"]
    between = _links_between(hardware, src_host, dst_host)
    if goes_direct(hardware, src, dst):
        return [f"{src}.up", *between, f"{dst}.down"]
    return _to_dram(hardware, src, src_host) + between + _from_dram(hardware, dst, dst_host)


def goes_direct(hardware: Hardware, src: str, dst: str) -> bool:
    """Whether network cards move these bytes between the memories of two GPUs, without DRAM and without a copy."""
    network, devices = hardware.network, hardware.device_by_name
    between_devices = src in devices and dst in devices and devices[src].host != devices[dst].host
    return between_devices and network is not None and network.gpu_direct


def _links_between(hardware: Hardware, src_host: int, dst_host: int) -> list[str]:
    """The links between two hosts: of different racks, the uplinks of both as well."""
    if src_host == dst_host:
        return []
    racks = hardware.racks
    uplinks = []
    if racks and racks[src_host] != racks[dst_host]:
        uplinks = [f"rack{racks[src_host]}.up", f"rack{racks[dst_host]}.down"]
    return [f"nic{src_host}.up", *uplinks, f"nic{dst_host}.down"]


def _to_dram(hardware: Hardware, memory: str, host: int) -> list[str]:
    if memory in hardware.device_by_name:
        return [
            f"{memory}.up",
            *_both_ways(hardware, memory, host),
            f"rc{host}.{hardware.device_by_name[memory].root_complex}.up",
        ]
    if memory.startswith("ssd"):
        uplink = [] if hardware.hosts[host].ssd_uplink_bandwidth is None else [f"ssdbus{host}.up"]
        return [f"{memory}.read", *uplink]
    return []


def _from_dram(hardware: Hardware, memory: str, host: int) -> list[str]:
    if memory in hardware.device_by_name:
        return [
            f"rc{host}.{hardware.device_by_name[memory].root_complex}.down",
            *_both_ways(hardware, memory, host),
            f"{memory}.down",
        ]
    if memory.startswith("ssd"):
        uplink = [] if hardware.hosts[host].ssd_uplink_bandwidth is None else [f"ssdbus{host}.down"]
        return [*uplink, f"{memory}.write"]
    return []


def _both_ways(hardware: Hardware, device: str, host: int) -> list[str]:
    """The bandwidth that both directions of a device's root complex share."""
    number = hardware.device_by_name[device].root_complex
    return [] if hardware.hosts[host].root_complexes[number].bandwidth_both is None else [f"rc{host}.{number}.both"]


def build_graph(hardware: Hardware) -> nx.MultiDiGraph:
    """Memories (with their budget in bytes) and switches as nodes, links in one direction as edges keyed by name."""
    import networkx as nx  # imported here, because a worker needs no graph and starts sooner without it

    graph = nx.MultiDiGraph(name=hardware.name)
    for memory, budget_bytes in hardware.memories().items():
        graph.add_node(memory, budget_bytes=budget_bytes)
    for link in hardware.links().values():
        if link.tail != link.head:
            graph.add_edge(link.tail, link.head, key=link.name, bandwidth=link.bandwidth, latency_s=link.latency_s)
    return graph


def unknown_memory(hardware: Hardware, memory: str) -> HardwareError:
    """The error for a memory name that the machine does not have."""
    return HardwareError(f"{hardware.name} has no memory {memory!r}; it has {', '.join(hardware.memories())}")
