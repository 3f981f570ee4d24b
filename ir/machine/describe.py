"""A machine in a few lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..units import format_bytes, format_flops, format_rate, format_seconds, time_text
from .rates import RateCurve, table_text
from .shares import message_text

if TYPE_CHECKING:
    from .hardware import Device, Hardware
    from .host import Host
    from .racks import Racks


def describe_hardware(hardware: Hardware) -> str:
    """Devices grouped when equal, then hosts, network, source; one line each."""
    lines = [f"{hardware.name}: {hardware.num_devices} devices on {len(hardware.hosts)} host(s)"]
    kinds = Counter(_describe_device(device) for device in hardware.devices)
    lines += [f"  {count} x {text}" for text, count in kinds.items()]
    tables = dict.fromkeys(device.rates for device in hardware.devices if device.rates is not None)
    lines += [f"    {line}" for table in tables for line in table_text(table)]
    hosts = Counter(_describe_host(host, _complex_sizes(hardware, i)) for i, host in enumerate(hardware.hosts))
    lines += [f"  {f'{count} hosts: ' if count > 1 else ''}{text}" for text, count in hosts.items()]
    if hardware.network is not None:
        network = hardware.network
        parts = [f"network {format_rate(network.bandwidth)} a host", format_seconds(network.latency_s)]
        parts += ["to and from GPU memory"] if network.gpu_direct else []
        parts += _describe_shares("messages of", network.message_shares, message_text)
        parts += _describe_shares("over hosts,", network.host_shares, "{:.0f}".format)
        lines.append(f"  {'; '.join(parts)}" if len(parts) > 2 else f"  {', '.join(parts)}")
        if network.racks is not None:
            lines[-1] += f"; {_describe_racks(network.racks, hardware, network.bandwidth)}"
    if hardware.failures is not None:
        mtbf_s = hardware.failures.mtbf_s(hardware.num_devices, len(hardware.hosts))
        lines.append(f"  a failure in {time_text(mtbf_s)}, {time_text(hardware.failures.restart_s)} to go on after one")
    if hardware.throttled:
        lines.append("  transfers are held down to these rates")
    lines.append(f"  figures: {hardware.source}")
    lines += [f"  fitted to {figure}: {what}" for figure, what in hardware.fitted_to.items()]
    return "\n".join(lines)


def _describe_racks(racks: Racks, hardware: Hardware, host_bandwidth: float) -> str:
    sizes = Counter(Counter(hardware.racks).values())
    uplink = racks.uplink(len(hardware.hosts), host_bandwidth)
    over = max(sizes) * host_bandwidth / uplink
    count = " and ".join(f"{number} racks of {size} hosts" for size, number in sorted(sizes.items(), reverse=True))
    return f"{count}, an uplink of {format_rate(uplink)} each ({over:.3g} to 1)"


def _complex_sizes(hardware: Hardware, host: int) -> list[int]:
    """Number of devices under each root complex of a host."""
    under = Counter(device.root_complex for device in hardware.devices if device.host == host)
    return [under[number] for number in range(len(hardware.hosts[host].root_complexes))]


def _describe_device(device: Device) -> str:
    rates = ", ".join(f"{dtype} {format_flops(device.achieved_flops(dtype))}" for dtype in device.peak_flops)
    return (
        f"{device.kind}: {format_bytes(device.budget_bytes)} usable of {format_bytes(device.memory_bytes)}, "
        f"memory {format_rate(device.memory_bandwidth)}, {rates} achieved, "
        f"links {format_rate(device.h2d_bandwidth)} in and {format_rate(device.d2h_bandwidth)} out"
    )


def _describe_host(host: Host, complex_sizes: list[int]) -> str:
    parts = [
        f"DRAM {format_bytes(host.dram_bytes)} at {format_rate(host.dram_bandwidth)}"
        + (f", the devices' memory too, {format_bytes(host.usable_bytes)} usable" if host.shared_memory else "")
        + (f", {format_bytes(host.model_bytes)} of it the script's own copy of the model" if host.model_bytes else ""),
        f"{host.cpu_cores} cores, AdamW {host.optimizer_params_per_s / 1e9:.2f} G parameters/s"
        + ("" if host.optimizer_threads is None else f" with {host.optimizer_threads} threads"),
        f"root complexes {'+'.join(map(str, complex_sizes))} at {format_rate(host.root_complexes[0].bandwidth_down)}",
    ]
    if host.nvlink_bandwidth is not None:
        parts.append(f"device to device {format_rate(host.nvlink_bandwidth)}")
        parts += _describe_shares("messages of", host.nvlink_message_shares, message_text)
    elif host.p2p:
        parts.append("peer to peer")
    if host.communicators is not None:
        rest, *ends = (
            format_bytes(getattr(host.communicators, f"{name}_bytes")) for name in ("rest", "sender", "receiver")
        )
        parts.append(f"a communicator takes {rest} at rest, a connection of it {' and '.join(ends)}")
    if host.ssds:
        read, write = host.ssd_bandwidths
        size = format_bytes(sum(s.size_bytes for s in host.ssds))
        at = ", ".join(ssd.directory for ssd in host.ssds if ssd.directory is not None)
        rates = f"read {format_rate(read)}, write {format_rate(write)}"
        parts.append(f"{len(host.ssds)} SSD{f' in {at}' if at else ''}, {size}, {rates}")
    return "; ".join(parts)


def shared_texts(hardware: Hardware) -> list[str]:
    """The sentences of hosts whose devices share their memory, of equal hosts that of the first."""
    kinds = hardware.host_kinds
    return [text for kind in dict.fromkeys(kinds) if (text := shared_text(hardware, kinds.index(kind)))]


def shared_text(hardware: Hardware, host: int) -> str:
    """A sentence on the memory that a host's devices share with its CPU; empty where they have their own."""
    here = hardware.hosts[host]
    if not here.shared_memory:
        return ""
    names = ", ".join(device.name for device in hardware.devices if device.host == host)
    return (
        f"{names} and dram{host} are one memory of {format_bytes(here.dram_bytes)}, of which plans may use "
        f"{format_bytes(here.usable_bytes)} in all"
    )


def _describe_shares(of: str, curve: RateCurve | None, text: Callable[[float], str]) -> list[str]:
    """The shares of a curve, if there is one, as one part of a line."""
    if curve is None:
        return []
    return [f"{of} {', '.join(f'{text(size)}: {share:.0%}' for size, share in curve)} of the rate"]
