"""The cores of a host, which its CPU devices share and which may be fewer than their threads.

Everything that a CPU device does needs cores: computation and updates one per thread, a copy between its memory and
DRAM one, a message one on either side. As under an operating system, every thread that wants to run gets an equal share
of the cores; a thread that needs less leaves the rest to others. Throttled transfers sleep most of the time and take no
cores.
"""

from __future__ import annotations

from ...ir.machine.hardware import Device, Hardware
from ...ir.machine.links import Link
from .sharing import Path

THREADS_OF_A_MESSAGE = 2  # the sender's and the receiver's, which both copy through the loopback all the time


def core_links(hardware: Hardware) -> dict[str, Link]:
    """Links for the cores of each host with CPU devices (core-seconds per second), and for each use of them.

    The bandwidth of a use is its rate if it had all cores; its weight is the rate that one thread gives.
    """
    found: dict[str, Link] = {}
    for device in hardware.devices:
        if device.kind != "cpu":
            continue
        host = hardware.hosts[device.host]
        cores, threads = _cores(device), float(_threads(device, hardware))
        found[cores] = Link(cores, cores, cores, float(host.cpu_cores), 0.0)
        found[_own(device)] = Link(_own(device), cores, cores, threads, 0.0, weight=threads)
        if not hardware.throttled:
            for name, rate in ((copying(device), device.h2d_bandwidth), (messaging(device), host.nvlink_bandwidth)):
                if rate is not None:
                    threads_of = 1 if name == copying(device) else THREADS_OF_A_MESSAGE
                    whole = host.cpu_cores * rate / threads_of
                    found[name] = Link(name, cores, cores, whole, 0.0, simplex=cores, weight=rate)
    return found


def staged_links(hardware: Hardware) -> dict[str, Link]:
    """A link for each GPU whose messages are copied through DRAM at a rate of their own."""
    found = {}
    for device in hardware.devices:
        host = hardware.hosts[device.host]
        if device.kind != "cpu" and host.staged_bandwidth is not None and not (host.p2p or host.nvlink_bandwidth):
            name, dram = messaging(device), f"dram{device.host}"
            found[name] = Link(name, device.name, dram, host.staged_bandwidth, 0.0)
    return found


def core_flow(device: Device, hardware: Hardware, alone_s: float) -> tuple[Path, float]:
    """The path and core-seconds of work that takes a device's threads `alone_s` if no one else uses their cores."""
    return (_own(device), _cores(device)), alone_s * _threads(device, hardware)


def update_s(device: Device, hardware: Hardware, params: float) -> float:
    """Seconds of an update by the device's threads; the host's optimizer rate is that of all its cores."""
    host = hardware.hosts[device.host]
    return params / (host.optimizer_params_per_s * _threads(device, hardware) / host.cpu_cores)


def copying(device: Device) -> str:
    """The link that a copy by one of the device's threads takes in addition to those of its path."""
    return f"{device.name}.copying"


def messaging(device: Device) -> str:
    """The link that a message from the device takes in addition to those of its path."""
    return f"{device.name}.messaging"


def _threads(device: Device, hardware: Hardware) -> int:
    return min(device.threads, hardware.hosts[device.host].cpu_cores)


def _own(device: Device) -> str:
    return f"{device.name}.threads"


def _cores(device: Device) -> str:
    return f"host{device.host}.cores"
