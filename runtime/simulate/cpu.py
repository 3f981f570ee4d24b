"""What CPU devices share: the cores of their host, which are fewer than all their threads want at times.

Everything that such a device does needs cores: computation and updates as many as it has threads, a copy between its
memory and DRAM one, a message one on either side for as long as it takes. Cores are shared as the operating system
does it, the same for every thread that wants to run; who wants less leaves the rest to others. Transfers that are held
down to slower links sleep most of the time and take no cores.
"""

from __future__ import annotations

from ...ir.machine.hardware import Device, Hardware
from ...ir.machine.links import Link
from .sharing import Path

THREADS_OF_A_MESSAGE = 2  # the sender's and the receiver's: both copy through the loopback all the time


def core_links(hardware: Hardware) -> dict[str, Link]:
    """Per host with CPU devices its cores (core-seconds per second), and what its devices ask of them.

    The link of a use is as wide as that use with all cores for itself, its weight what one thread's share of it gives.
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


def core_flow(device: Device, hardware: Hardware, alone_s: float) -> tuple[Path, float]:
    """What takes a device's threads `alone_s` when they have cores for themselves, in core-seconds."""
    return (_own(device), _cores(device)), alone_s * _threads(device, hardware)


def update_s(device: Device, hardware: Hardware, params: float) -> float:
    """Seconds of an update by the device's threads, of which the host's rate counts as many as it has cores."""
    host = hardware.hosts[device.host]
    return params / (host.optimizer_params_per_s * _threads(device, hardware) / host.cpu_cores)


def copying(device: Device) -> str:
    """The link that a copy by one of the device's threads takes beside those of its way."""
    return f"{device.name}.copying"


def messaging(device: Device) -> str:
    """The same for a message that the device sends."""
    return f"{device.name}.messaging"


def _threads(device: Device, hardware: Hardware) -> int:
    return min(device.threads, hardware.hosts[device.host].cpu_cores)


def _own(device: Device) -> str:
    return f"{device.name}.threads"


def _cores(device: Device) -> str:
    return f"host{device.host}.cores"
