"""The machine that the ranks of a torchrun form: each host describes itself, the hosts time the network between them
(gloo between CPU devices, NCCL between GPUs), and every rank joins the descriptions to the same document."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ...ir.errors import HardwareError, PenstockError, PlanError, error_from_data, error_to_data
from ...ir.machine.hardware import Hardware
from ...ir.machine.presets import CopyRates
from ...ir.machine.spelling import key_and_value, missing_unit, plain_value
from ..measure.detect import detect_hardware, spans_hosts
from ..measure.links import CPU
from ..measure.network import network_rates
from .ranks import Ranks
from .rows import Member
from .store_thread import connect_store

NETWORK_BYTES_S = 1.25e9  # 10 Gb/s, if the system does not know a network interface's rate
NETWORK_LATENCY_S, SHORTEST_S = 50e-6, 1e-6
ARRIVAL_S, PATIENCE_S = 60.0, 300.0
_AMOUNTS = ("memory", "dram", "ssd")  # of bytes, which their names do not say
NETWORK_PATIENCE_S = 200.0  # less than the other ranks' patience


def detect(measure: bool = False) -> Hardware:
    """Describe this machine, or the one that the hosts of this torchrun form: the package's `Hardware.detect`."""
    return _detect_together(measure) if spans_hosts() else detect_hardware(measure)


def typed_hardware(name: str, changes: Sequence[str] | None, measure: bool = False) -> Hardware:
    """The machine of `--hardware NAME` with every `--set key=value` of a command line. `measure`: as of `detect`."""
    pairs = (key_and_value("set", change, "dram=4TB") for change in changes or ())
    values = {key: plain_value(text) for key, text in pairs}
    for key, value in values.items():
        if key in _AMOUNTS and type(value) in (int, float) and value > 0:
            raise PlanError(missing_unit(f"--set {key}=", str(value)))
    if name == "cpu":
        known = list(inspect.signature(Hardware.cpu).parameters)[:-1]  # the last stands for all rates
        after = known.index("ssd") + 1
        known[after:after] = CopyRates._fields
        wrong = [key for key in values if key not in known]
        if wrong:
            raise PlanError(f"--set {wrong[0]}: with --hardware cpu there are {', '.join(known)}")
        return Hardware.cpu(**values)
    hardware = detect(measure) if name in ("auto", "detect") else Hardware.from_any(name)
    return hardware.with_(**values) if values else hardware


def _detect_together(measure: bool) -> Hardware:
    """`joint_hardware` of the ranks of this torchrun, before anything else joins them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = os.environ.get("GROUP_RANK", "")
    ranks = Ranks(connect_store(PATIENCE_S), rank, size, ARRIVAL_S, node=node, patience_s=PATIENCE_S)
    try:
        return joint_hardware(ranks, measure)
    finally:
        ranks.leave()


def joint_hardware(ranks: Ranks, measure: bool = False) -> Hardware:
    """A machine with one device per rank, in the ranks' order, on the ranks' hosts. All ranks must call it. `measure`:
    whether hosts time their own rates, too.

    Raises the same `HardwareError` on all ranks if a host has fewer GPUs than ranks, or if the network cannot be timed.
    """
    firsts = sorted({member.node: member.rank for member in reversed(ranks.members)}.values())  # of each host
    mine: dict[str, Any] | None = None
    if ranks.rank in firsts:
        try:
            document = detect_hardware(measure).model_dump(mode="json")
            mine = {"document": document, "network": _rate(ranks.members[ranks.rank])}
        except PenstockError as error:
            mine = {"error": error_to_data(error)}
    rows = ranks.exchange(mine)
    device = _messenger([rows[rank] for rank in firsts])
    if len(firsts) == 1 or device is None:
        return combine(rows, ranks.members)
    timed: dict[str, Any] | None = None
    if ranks.rank in firsts:
        timed = _time_network(ranks, firsts.index(ranks.rank), len(firsts), device)
    return combine(rows, ranks.members, ranks.exchange(timed)[firsts[0]])


def _messenger(rows: Sequence[Mapping[str, Any]]) -> torch.device | None:
    """The device of each host whose messages are timed: its first GPU, or the CPU. None if hosts differ in that, which
    no run's messages do, if torch has no NCCL, or if a host could not describe itself: its error is raised later."""
    if any("error" in row for row in rows):
        return None
    kinds = {device["kind"] for row in rows for device in row["document"]["devices"]}
    if kinds == {"cuda"}:
        return torch.device("cuda", 0) if dist.is_nccl_available() else None
    return CPU if kinds == {"cpu"} else None


def _time_network(ranks: Ranks, host: int, num_hosts: int, device: torch.device) -> dict[str, Any]:
    """The network's fields as this host has timed them, or the error. NCCL waits for ever for a host that it does not
    reach, so a thread of its own does."""
    found: list[dict[str, Any]] = []
    failed: list[Exception] = []

    def time_it() -> None:
        try:
            found.append(network_rates(dist.PrefixStore("network", ranks.store), host, num_hosts, device=device))
        except Exception as error:  # raised below, in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=time_it, name="penstock-network", daemon=True)
    thread.start()
    thread.join(NETWORK_PATIENCE_S)
    if found:
        return found[0]
    if failed and not isinstance(failed[0], RuntimeError):  # neither gloo's nor NCCL's
        raise failed[0]
    why = failed[0] if failed else f"no answer in {NETWORK_PATIENCE_S:.0f} s"
    said = f"the network between {num_hosts} hosts cannot be timed: {why}; give a document as hardware instead"
    return {"error": error_to_data(HardwareError(said))}


def combine(
    rows: Sequence[Mapping[str, Any] | None], members: Sequence[Member], timed: Mapping[str, Any] | None = None
) -> Hardware:
    """Join the hosts' descriptions. `rows` has, for the first rank of each host, the document of that host and its
    network's bytes/s, and None for other ranks. `timed`: the network's fields as the hosts have timed them."""
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
        "source": "detected by each host; the network's rate "
        + ("measured between them" if timed else "as its interface says, 10 Gb/s where it does not"),
        "hosts": hosts,
        "devices": devices,
    }
    if timed and "error" in timed:
        raise error_from_data(timed["error"], str(members[0]))
    if len(hosts) > 1:
        whole["network"] = timed or {"bandwidth": min(rates), "latency_s": NETWORK_LATENCY_S}
    found = Hardware.model_validate(whole)
    if timed is None or found.network is None:
        return found
    own_s = 2 * max(device.link_latency_s for device in found.devices)  # of a message's latency, that of the two links
    network = found.network.model_copy(update={"latency_s": max(SHORTEST_S, found.network.latency_s - own_s)})
    return found.model_copy(update={"network": network})


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
