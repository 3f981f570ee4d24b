"""Timing the network between hosts over the connections that a run's messages take: gloo between CPU devices, NCCL
between GPUs.

Hosts 0 and 1 send each other messages of a few sizes, one direction at a time. If there are more hosts, then all send
at the same time, each to the next: what that takes longer is what more hosts reach of the network's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..device.peers import PeerLink
from .links import CPU, message_rates, two_lanes, undisturbed_s

MIB = 2**20
MESSAGE_BYTES = (64 * 2**10, MIB, 16 * MIB)
RING = "ring"
REPEATS = 4


def network_rates(
    store: dist.Store, host: int, num_hosts: int, sizes: Sequence[int] = MESSAGE_BYTES, device: torch.device = CPU
) -> dict[str, Any]:
    """The fields of a network: `bandwidth` (bytes/s), `latency_s`, `message_shares` and `host_shares`, of which hosts
    other than 0 have their own part only. One process of each of two or more hosts must call it; `store` joins these,
    and holds nothing else. `device`: the device whose memory has the messages."""
    found: dict[str, Any] = {}
    if host < 2:
        rates = message_rates(dist.PrefixStore("pair", store), host, sizes, hostname=None, device=device)
        found = {"bandwidth": rates["link"], "latency_s": rates["link_latency_s"]}
        found["message_shares"] = rates["link_shares"]
    if num_hosts > 2:
        passing_s = _ring_s(dist.PrefixStore("all", store), host, num_hosts, sizes[-1], device)
        if host == 0:
            alone_s = found["latency_s"] + sizes[-1] / found["bandwidth"]
            share = min(1.0, float(f"{alone_s / passing_s:.3g}"))
            found["host_shares"] = {2: 1.0, num_hosts: share} if share < 1 else None
    return found


def _ring_s(store: dist.Store, host: int, num_hosts: int, size: int, device: torch.device) -> float:
    """Seconds in which every host sends a message of `size` bytes to the next, all at the same time."""
    after, before = (host + 1) % num_hosts, (host - 1) % num_hosts
    link = PeerLink(store, host, num_hosts, {}, device, timeout_s=60.0)
    link.connect({(host, after): [RING], (before, host): [RING]}, {})
    value = torch.ones(size, dtype=torch.uint8, device=device)
    with two_lanes(device) as (sends, receives):

        def pass_on() -> None:
            sent = sends.issue(lambda: link.send(value, after, RING))
            receives.wait(receives.issue(lambda: link.recv(torch.empty_like(value), before, RING)))
            sends.wait(sent)

        return undisturbed_s(pass_on, REPEATS)
