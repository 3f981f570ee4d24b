"""The machine as a picture: memories, switches and the links between them, with their loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir.machine.hardware import Hardware
from ....runtime.simulate import Timeline
from ...plan import Prediction


def machine_facts(hardware: Hardware, timeline: Timeline, predicted: Prediction | None) -> dict[str, Any]:
    """Nodes and links of the first host; how many more there are. Of its SSDs either all as one array or the single
    ones, whichever the step uses."""
    shown = {0} if len(hardware.hosts) > 1 else set(range(len(hardware.hosts)))
    peaks: Mapping[str, int] = {} if predicted is None else predicted.peak_bytes
    budgets: Mapping[str, int] = {} if predicted is None else predicted.budget_bytes
    nodes: dict[str, dict[str, Any]] = {}
    links = []
    unused = _unused_disks(hardware, timeline)
    for link in hardware.links().values():
        if {link.tail, link.head} & unused:
            continue
        if not {_host_of(hardware, link.tail), _host_of(hardware, link.head)} <= {*shown, None}:
            continue
        for name in (link.tail, link.head):
            kind = "device" if name in hardware.device_by_name else name.rstrip("0123456789.")
            nodes.setdefault(
                name, {"name": name, "kind": kind, "peak": peaks.get(name), "budget": budgets.get(name)}
            )
        links.append(
            {
                "name": link.name,
                "from": link.tail,
                "to": link.head,
                "busy": timeline.link_busy.get(link.name, 0.0),
                "bytes": timeline.moved_bytes.get(link.name, 0),
                "bandwidth": link.bandwidth,
            }
        )
    return {"nodes": list(nodes.values()), "links": links, "more_hosts": len(hardware.hosts) - len(shown)}


def _unused_disks(hardware: Hardware, timeline: Timeline) -> set[str]:
    """The SSDs that stand for the same disks as others that the step uses, or else the single ones."""
    used = {
        name
        for link in hardware.links().values()
        if timeline.moved_bytes.get(link.name)
        for name in (link.tail, link.head)
    }
    found = set()
    for index, host in enumerate(hardware.hosts):
        single = {f"ssd{index}.{number}" for number in range(len(host.ssds))}
        found |= {f"ssd{index}"} if single & used else single
    return found


def _host_of(hardware: Hardware, name: str) -> int | None:
    """The host of a memory or switch; None for the network."""
    device = hardware.device_by_name.get(name)
    if device is not None:
        return device.host
    digits = name.lstrip("abcdefghijklmnopqrstuvwxyz_").partition(".")[0]
    return int(digits) if digits.isdigit() else None
