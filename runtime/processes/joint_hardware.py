"""The machine that the ranks of a torchrun form: each host describes itself, and every rank joins the descriptions to
the same document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from ...ir.errors import HardwareError, PenstockError, error_from_data, error_to_data
from ...ir.machine.hardware import Hardware
from ..measure.detect import detect_hardware
from .ranks import Ranks
from .rows import Member

NETWORK_BYTES_S = 1.25e9  # 10 Gb/s, if the system does not know a network interface's rate
NETWORK_LATENCY_S = 50e-6


def joint_hardware(ranks: Ranks) -> Hardware:
    """A machine with one device per rank, in the ranks' order, on the ranks' hosts. All ranks must call it.

    Raises the same `HardwareError` on all ranks if a host has fewer GPUs than ranks.
    """
    first = next(member.rank for member in ranks.members if member.node == ranks.members[ranks.rank].node)
    mine: dict[str, Any] | None = None
    if ranks.rank == first:
        try:
            mine = {"document": detect_hardware().model_dump(mode="json"), "network": _rate(ranks.members[first])}
        except PenstockError as error:
            mine = {"error": error_to_data(error)}
    return combine(ranks.exchange(mine), ranks.members)


def combine(rows: Sequence[Mapping[str, Any] | None], members: Sequence[Member]) -> Hardware:
    """Join the hosts' descriptions. `rows` has, for the first rank of each host, the document of that host and its
    network's bytes/s, and None for other ranks."""
    hosts: list[dict[str, Any]] = []
    devices: list[dict[str, Any]] = []
    names: list[str] = []
    rates: list[float] = []
    for row, member in zip(rows, members, strict=True):
        if row is None:
            continue
        if "error" in row:
            raise error_from_data(row["error"], str(member), prefix=f"{member}: ")
        count = sum(other.node == member.node for other in members)
        document = row["document"]
        for device in _devices_of(document, count, member):
            devices.append({**device, "host": len(hosts), "name": f"{_prefix(device)}{len(devices)}"})
        hosts.append(document["hosts"][0])
        names.append(document["name"])
        rates.append(row["network"] or NETWORK_BYTES_S)
    whole: dict[str, Any] = {
        "name": names[0] if len(names) == 1 else f"{len(names)} hosts: {' + '.join(dict.fromkeys(names))}",
        "source": "detected by each host; the network's rate as its interface says, 10 Gb/s where it does not",
        "hosts": hosts,
        "devices": devices,
    }
    if len(hosts) > 1:
        whole["network"] = {"bandwidth": min(rates), "latency_s": NETWORK_LATENCY_S}
    return Hardware.model_validate(whole)


def _devices_of(document: Mapping[str, Any], count: int, member: Member) -> list[dict[str, Any]]:
    """`count` devices of a host: its first GPUs, or equal shares of its CPU's cores and memory."""
    found: list[dict[str, Any]] = list(document["devices"])
    if found[0]["kind"] == "cuda":
        if count > len(found):
            raise HardwareError(
                f"{member.host} has {len(found)} GPUs, torchrun has started {count} ranks there; use "
                f"--nproc-per-node={len(found)}"
            )
        return found[:count]
    cores = sum(device["threads"] for device in found)
    threads = max(1, cores // count)
    memory_bytes = sum(Hardware.model_validate(document).devices[i].memory_bytes for i in range(len(found))) // count
    own = Hardware.model_validate(document).devices[0]
    peak = {dtype: rate * threads / own.threads for dtype, rate in own.peak_flops.items()}
    return [{**found[0], "memory_bytes": memory_bytes, "threads": threads, "peak_flops": peak}] * count


def _prefix(device: Mapping[str, Any]) -> str:
    return "gpu" if device["kind"] == "cuda" else "cpu"


def _rate(member: Member) -> float | None:
    """Bytes/s of the network interface with the host's address; None if the system does not know them."""
    stats = psutil.net_if_stats()
    for name, rows in psutil.net_if_addrs().items():
        if any(row.address == member.address for row in rows) and name in stats and stats[name].speed > 0:
            return stats[name].speed * 1e6 / 8
    return None
