"""Known machines by name, as plain documents for `Hardware`.

`PARTS` (`gpu_parts.py`) holds datasheet figures of GPUs; a family name such as `rtx4090x4-2rc` puts a number of one
part into a server. The machines of the papers are written out one by one. Every document states where its figures come
from.

What datasheets do not say is assumed by a few rules, the same for all machines:
- PCIe x16 moves 13.1, 26 and 52 GB/s per direction for generation 3, 4 and 5 (83% of the wire rate; Mobius
  measured 13.1 on generation 3), fewer lanes their part of it.
- All GPUs under one root complex share one x16 uplink, through a switch or split lanes.
- DRAM reaches 80% of its channels' rate; AdamW on the CPU moves 28 bytes a parameter at 60% of that.
- A gaming GPU's half-precision rate is the one with fp32 accumulation, which is what torch uses.
- A GPU keeps a reserve that is not a plan's (`stated_reserve`): a context, workspaces, buffers of messages, gaps, and
  on a gaming card a display. The papers' machines have none, only the part of the memory that a plan may use.
- Parts that were measured have tables of rates by size (`part_rates.py`), those in the papers' machines too; the
  others have one constant rate.
- Where CPU and GPU share one memory, a plan may use `SHARED_CAP` of it, GPU and CPU together, and the GPU
  `SHARED_DEVICE` of it. The rest is for the system, the page cache and the GPU's reserve. A copy reads and writes that
  memory, so it moves at most half of its bandwidth.

Some figures of the papers' machines nobody has published. They are fitted to one figure of the paper each, once, and
`fitted_to` names it: the reproduction of that figure says nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import HardwareError
from ..extensions import entries
from ..units import parse_bytes
from .call_mix import FP8
from .gpu_parts import PARTS, SERVERS, GpuPart, has_float8
from .overrides import MOST, STOCK_SSD, require_count
from .part_rates import MEASURED, part_rates

Document = dict[str, Any]
# What all-gathers reach of p3dn's network, fitted to what MiCS's text says of its figure 2: 11 GB/s over 8 hosts, and
# over 4 hosts 2.7 to 4.9 times what they reach over 32 (section 3.2). It names one size, 128 MB. Taken are 1 GB for the
# 11 and the 128 MB for the 2.7; two numbers follow, the share of large messages and the 94 kB of a message that reaches
# half of it, m / (m + 94 kB). The 4.9 then belongs to gathers of 32 MB. That hosts matter by the size of messages alone
# is what section 2.3 says: with more hosts, larger messages saturate the network. p4d has four such network cards a
# host, and p3dn's shares.
MICS_SHARES = {
    "message_shares": {"16kB": 0.145, "64kB": 0.405, "256kB": 0.731, "1MB": 0.914, "4MB": 0.977, "16MB": 0.994},
    "host_shares": {2: 0.946},
}
MICS_FITTED = {"mics fig2": "the shares that gathers reach of the network's rate, and NVLink's 128 GB/s"}
# What 12 disks reach together, fitted to one row of Fuyou's figure 8, where disks are most of both steps: at batch 8 on
# the A100, ZeRO-Infinity takes 1.66 times as long as Fuyou without overlap. One disk has its datasheet's rates. 12 read
# 30 GB/s together, which is what one PCIe 4 x16 link carries.
FUYOU_SSD_SHARES = {1: 1.0, 12: 0.39}
FUYOU_FITTED = {"fuyou fig8: 13B, A100, batch 8": "what 12 disks reach together"}
PCIE_X16 = {3: 13.1e9, 4: 26e9, 5: 52e9}
# Of the memory that a GPU shares with the CPU: users of a DGX Spark found 0.85 to 0.87 safe for all of a program, and
# the host stopping above (conselara.dev/notes/dgx-spark-gb10-hardware-reference).
SHARED_CAP, SHARED_DEVICE = 0.85, 0.8
# PCIe 4 x4 M.2: rates and 1200 TBW of the Samsung 980 PRO 2 TB datasheet.
CONSUMER_SSD = {
    "size_bytes": "2TB", "read_bandwidth": "7GB/s", "write_bandwidth": "5GB/s", "endurance_bytes": "1.2PB",
}  # fmt: skip


MIB = 2**20
MESSAGES_BYTES = 256 * MIB
# torch's CublasHandlePool.cpp (2.13): the workspace of cuBLAS and cuBLASLt together, for each pair of a thread and a
# stream with products. Forward has one such pair, and backward, on autograd's thread, another. From 2.15 on each
# product gives it back, so that no more is taken.
CUBLAS_BYTES, CUBLAS_PAIRS = 32 * MIB, 2
CUBLAS_BYTES_BEFORE_HOPPER = (2 * 4096 + 8 * 16) * 1024


def cublas_bytes(capability: tuple[int, int]) -> int:
    """The workspace of cuBLAS on a GPU of this compute capability."""
    return CUBLAS_BYTES if capability >= (9, 0) else CUBLAS_BYTES_BEFORE_HOPPER


def gaps_bytes(memory_bytes: int) -> int:
    """The bytes of a full card that torch's allocator holds and cannot use: bench/cards.py found up to a fortieth."""
    return memory_bytes // 32


def stated_reserve(num_devices: int, display: bool, memory_bytes: int) -> Document:
    """The bytes that each GPU holds besides a plan's values, where they were not measured.

    A process's context with torch's kernels took 400 to 500 MiB on the cards of the last generations; torch gives
    cuBLAS `CUBLAS_BYTES` a stream and thread; a desktop takes half a GiB. `MESSAGES_BYTES` are left for communicators;
    a plan whose communicators take more leaves more (`reserve_communicators`).
    """
    return {
        "context_bytes": 512 * MIB, "libraries_bytes": CUBLAS_PAIRS * CUBLAS_BYTES,
        "messages_bytes": MESSAGES_BYTES if num_devices > 1 else 0, "display_bytes": 512 * MIB if display else 0,
        "gaps_bytes": gaps_bytes(memory_bytes),
    }  # fmt: skip


def with_reserve(document: Document, display: bool) -> Document:
    """The machine with the stated reserve in each of its GPUs."""
    count = len(document["devices"])
    devices = [
        {**device, "reserve": stated_reserve(count, display, device["memory_bytes"])} for device in document["devices"]
    ]
    return document | {"devices": devices}


def links_of(part: GpuPart, pcie: int | None = None) -> tuple[float, float]:
    """Bytes/s from DRAM to a GPU and back, on a slot of generation `pcie` (the part's own by default)."""
    if part.link_gb_s is not None:
        return part.link_gb_s[0] * 1e9, part.link_gb_s[1] * 1e9
    if part.server is not None and SERVERS[part.server].shared_memory:
        return part.memory_gb_s / 2 * 1e9, part.memory_gb_s / 2 * 1e9
    link = PCIE_X16[pcie or part.pcie] * part.lanes / 16
    return link, link


def gpu(part_name: str, index: int, root_complex: int = 0, host: int = 0, pcie: int | None = None) -> Document:
    """One device of a known part, on a slot of generation `pcie` (the part's own by default)."""
    part = PARTS[part_name]
    down, up = links_of(part, pcie)
    peak = {"fp32": part.fp32 * 1e12, "fp16": part.half * 1e12}
    achieved = {"fp32": 0.85, "fp16": part.achieved_half}
    if part.bf16:
        peak["bf16"], achieved["bf16"] = peak["fp16"], part.achieved_half
    if has_float8(part_name):
        peak[FP8], achieved[FP8] = 2 * peak["fp16"], part.achieved_half
    return {
        "name": f"gpu{index}", "kind": "cuda", "host": host, "root_complex": root_complex,
        "memory_bytes": round(part.gib * 2**30), "peak_flops": peak, "achieved_fraction": achieved,
        "memory_bandwidth": part.memory_gb_s * 1e9, "h2d_bandwidth": down, "d2h_bandwidth": up,
        "rates": part_rates(part_name, peak) if part_name in MEASURED else None,
    }  # fmt: skip


def host(dram: str, channels_gb_s: float, cores: int, root_complexes: int, link: float, **more: Any) -> Document:
    """One host; `channels_gb_s` is the rate of its DRAM channels together, `link` that of each root complex."""
    dram_bandwidth = 0.8 * channels_gb_s * 1e9
    return {
        "dram_bytes": dram, "dram_bandwidth": dram_bandwidth, "cpu_cores": cores,
        "optimizer_params_per_s": 0.6 * dram_bandwidth / 28,
        "root_complexes": [{"bandwidth_up": link, "bandwidth_down": link} for _ in range(root_complexes)],
    } | more  # fmt: skip


def machine(
    name: str, source: str, part: str, topology: list[int], one_host: Document, pcie: int | None = None
) -> Document:
    """One host with `topology[r]` GPUs of one part under root complex r."""
    places = [complex_ for complex_, count in enumerate(topology) for _ in range(count)]
    devices = [gpu(part, index, complex_, pcie=pcie) for index, complex_ in enumerate(places)]
    return {"name": name, "source": f"{source}; {PARTS[part].source}", "hosts": [one_host], "devices": devices}


# -- the papers' machines ----------------------------------------------------------------------------------------------


def _mobius(name: str, topology: list[int], **more: Any) -> Document:
    source = (
        "Mobius (ASPLOS 2023) section 4: 2 Xeon Gold 6130, 1.5 TB, PCIe 3, at most 13.1 GB/s measured, no P2P; "
        "DRAM 12 channels of DDR4-2666"
    )
    server = host("1.5TB", 256, 32, len(topology), PCIE_X16[3], **more)
    return machine(name, source, "rtx3090ti", topology, server, pcie=3)


def _mobius_v100() -> Document:
    source = (
        "Mobius (ASPLOS 2023) section 4: EC2 p3.8xlarge, NVLink 300 GB/s both directions together; "
        "DRAM, cores and price from AWS; 4 channels of DDR4-2400"
    )
    server = host("244GiB", 76.8, 16, 2, PCIE_X16[3], p2p=True, nvlink_bandwidth=150e9, price_dollars_per_hour=12.24)
    return machine("mobius-v100", source, "v100-16gb", [2, 2], server)


def _fuyou(name: str, part: str, price_dollars: float) -> Document:
    source = (
        "Fuyou (2024) table 3: Xeon Gold 5320, 768 GB, PCIe 4, 12 Intel P5510; 2 CPUs, as in the server of its table "
        "5, with 8 channels each at the 2933 MT/s that they support; prices of table 5; "
        "disk rates and endurance from the P5510 datasheet"
    )
    server = host(
        "768GB", 375.4, 52, 1, PCIE_X16[4], ssds=[STOCK_SSD] * 12, ssd_shares=FUYOU_SSD_SHARES,
        price_dollars=price_dollars,
    )  # fmt: skip
    document = machine(name, source, part, [1], server) | {"fitted_to": FUYOU_FITTED}
    if part == "a100-80gb":  # the paper's card is the PCIe model, whose HBM is a little slower
        document["devices"][0]["memory_bandwidth"] = 1935e9
    return document


def _ftpipe() -> Document:
    source = (
        "FTPipe (ATC 2021) section 5: 8 RTX 2080 Ti on PCIe 3; the host is not described: "
        "two root complexes of 4, 512 GB and 12 channels of DDR4-2666 assumed"
    )
    return machine("ftpipe-2080ti", source, "rtx2080ti", [4, 4], host("512GB", 256, 32, 2, PCIE_X16[3]))


def _mics(name: str, part: str, num_hosts: int, one_host: Document, network: Document, source: str) -> Document:
    """Hosts of 8 GPUs, two to a PCIe switch."""
    devices = [gpu(part, i, i // 2, pcie=3) for i in range(8)]
    return {
        "name": name, "source": f"{source}; {PARTS[part].source}", "copies": num_hosts, "hosts": [one_host],
        "devices": devices, "network": {"latency_s": "30us", **MICS_SHARES, **network},
        "fitted_to": MICS_FITTED,
    }  # fmt: skip


def _mics_p3dn(num_hosts: int) -> Document:
    source = (
        "MiCS (VLDB 2022) section 5: EC2 p3dn.24xlarge, 100 Gb/s, NVLink at the 128 GB/s measured inside a node; "
        "DRAM, cores, disks and price from AWS"
    )
    ssd = {"size_bytes": "900GB", "read_bandwidth": "2GB/s", "write_bandwidth": "1GB/s"}
    one = host(
        "768GiB", 256, 48, 4, PCIE_X16[3], p2p=True, nvlink_bandwidth=128e9, ssds=[ssd] * 2,
        price_dollars_per_hour=31.212,
    )  # fmt: skip
    return _mics(f"mics-p3dn:{num_hosts}", "v100-32gb", num_hosts, one, {"bandwidth": "100Gb/s"}, source)


def _mics_p4d(num_hosts: int) -> Document:
    source = (
        "MiCS (VLDB 2022) section 5: EC2 p4d.24xlarge, 400 Gb/s; GPUDirect RDMA, which p3dn lacks, by AWS's documents "
        "of EFA; NVLink at 80% of its 300 GB/s per direction assumed; DRAM, cores, disks and price from AWS; PCIe 3 "
        "hosts"
    )
    ssd = {"size_bytes": "1TB", "read_bandwidth": "2GB/s", "write_bandwidth": "1GB/s"}
    one = host(
        "1152GiB", 281.6, 48, 4, PCIE_X16[3], p2p=True, nvlink_bandwidth=240e9, ssds=[ssd] * 8,
        price_dollars_per_hour=32.77,
    )  # fmt: skip
    network = {"bandwidth": "400Gb/s", "gpu_direct": True}
    return _mics(f"mics-p4d:{num_hosts}", "a100-40gb", num_hosts, one, network, source)


_MICS: dict[str, Callable[[int], Document]] = {"mics-p3dn": _mics_p3dn, "mics-p4d": _mics_p4d}
_PAPERS: dict[str, Callable[[], Document]] = {
    "mobius-8gpu": lambda: _mobius("mobius-8gpu", [4, 4], price_dollars=20_000),
    "mobius-v100": _mobius_v100,
    "fuyou-4090": lambda: _fuyou("fuyou-4090", "rtx4090", 14_098 + 1_600 + 12 * 308),
    "fuyou-a100": lambda: _fuyou("fuyou-a100", "a100-80gb", 14_098 + 14_177 + 12 * 308),
    "ftpipe-2080ti": _ftpipe,
}


# -- common machines ---------------------------------------------------------------------------------------------------


def _cards(name: str, part: str, count: int, complexes: int, pcie: int | None) -> Document:
    """A workstation or server with PCIe cards."""
    if count < complexes:
        raise HardwareError(f"hardware preset {name!r}: {count} GPU(s) cannot sit under {complexes} root complexes")
    slot = pcie or PARTS[part].pcie
    topology = [count // complexes + (i < count % complexes) for i in range(complexes)]
    desktop = count <= 2 and PARTS[part].display
    channels_gb_s = {3: 42.7, 4: 51.2, 5: 89.6}[slot] if desktop else {3: 85.3, 4: 204.8, 5: 307.2}[slot]
    dram_gb = max(64, 2 * round(PARTS[part].gib))
    source = (
        f"{count} cards on PCIe {slot} x{PARTS[part].lanes}, {complexes} root complex(es) assumed; {dram_gb} GB DRAM a "
        f"card, {channels_gb_s:g} GB/s of DRAM channels and one 2 TB M.2 disk assumed"
    )
    cores = 16 if desktop else 32
    server = host(f"{dram_gb * count}GB", channels_gb_s, cores, complexes, PCIE_X16[slot], ssds=[CONSUMER_SSD])
    return with_reserve(machine(name, source, part, topology, server, pcie=slot), PARTS[part].display)


def _mixed_workstation(name: str) -> Document | None:
    """A workstation with different gaming cards, such as "rtx4090+rtx3090x2", under one root complex; None where the
    name is of no such cards."""
    found = [_FAMILY.fullmatch(word) or _FAMILY.fullmatch(f"{word}x1") for word in name.split("+")]
    cards: list[str] = []
    for match in found:
        if match is None or match["part"] not in PARTS or match["complexes"] or match["pcie"]:
            return None
        (count,) = _counts(name, [match["count"]])
        cards += [match["part"]] * count
    if any(PARTS[part].server is not None for part in cards):
        return None
    document = _cards(name, min(cards, key=lambda part: PARTS[part].pcie), len(cards), 1, None)
    sources = dict.fromkeys(f"{part}: {PARTS[part].source}" for part in cards)
    source = "; ".join([*document["source"].split("; ")[:2], *sources])
    devices = [gpu(part, index) for index, part in enumerate(cards)]
    return with_reserve({**document, "source": source, "devices": devices}, any(PARTS[part].display for part in cards))


def _server(name: str, part_name: str, count: int) -> Document:
    """A machine that is sold with its GPUs, or the share of it that belongs to `count` of them."""
    part = PARTS[part_name]
    server = SERVERS[part.server or ""]
    if count > server.gpus:
        raise HardwareError(
            f"hardware preset {name!r}: such a server holds at most {server.gpus} GPU{'s' * (server.gpus > 1)}"
        )
    share = count / server.gpus
    complexes = max(1, round(server.switches * share))
    ssds = [STOCK_SSD] * max(1, round(server.ssds * share))
    down, up = links_of(part)
    one = host(
        str(parse_bytes(server.dram) * count // server.gpus), server.channels_gb_s * share,
        max(1, round(server.cores * share)), complexes, down, ssds=ssds, p2p=True,
        nvlink_bandwidth=0.8 * (part.nvlink_gb_s or 0) * 1e9 if count > 1 else None,
    )  # fmt: skip
    one["root_complexes"] = [{"bandwidth_up": up, "bandwidth_down": down}] * complexes
    topology = [count // complexes + (i < count % complexes) for i in range(complexes)]
    source = f"{server.source}, {count} of {server.gpus} GPUs with their share of the host; NVLink at 80% of its rate"
    if server.shared_memory:
        source = f"{server.source}; CPU and GPU share its memory, of which a plan may use {SHARED_CAP:.0%}"
        one |= {"shared_memory": True, "dram_usable_fraction": SHARED_CAP, "ssds": [CONSUMER_SSD], "p2p": False}
    document = with_reserve(machine(name, source, part_name, topology, one), display=False)
    if server.shared_memory:
        document["devices"][0]["usable_fraction"] = SHARED_DEVICE
    return document


def _servers(name: str, part_name: str, num_hosts: int) -> Document:
    """Whole servers, joined by their network cards at 90% of the cards' rate."""
    server = SERVERS[PARTS[part_name].server or ""]
    document = _server(name, part_name, server.gpus)
    source = f"{document['source']}; {server.network_gbit_s:g} Gb/s of network cards a server, 90% of it assumed"
    network = {"bandwidth": 0.9 * server.network_gbit_s / 8 * 1e9, "latency_s": "30us"}
    return document | {"source": source, "copies": num_hosts, "network": network}


def _put_in_racks(document: Document, hosts_per_rack: str | None, oversubscription: str | None) -> Document:
    """The same hosts in racks, as a preset's name says it: `-rack16` or `-rack16-over4`."""
    if hosts_per_rack is None:
        return document
    over = float(oversubscription or 1)
    if not (int(hosts_per_rack) and over):
        raise HardwareError(f"hardware preset {document['name']!r}: a rack has 1 host or more, and over is more than 0")
    racks = {"hosts_per_rack": int(hosts_per_rack), "oversubscription": over}
    source = f"{document['source']}; racks of {hosts_per_rack} hosts, {over:g} to 1, as asked"
    return document | {"source": source, "network": document["network"] | {"racks": racks}}


def _laptop() -> Document:
    source = "a laptop with 16 GB of dual-channel DDR5-4800, 8 cores, RTX 4060 Laptop on PCIe 4 x8, one M.2 disk"
    ssd = {**CONSUMER_SSD, "size_bytes": "1TB", "endurance_bytes": "600TB"}  # of the same datasheet
    one = host("16GB", 76.8, 8, 1, PCIE_X16[4] / 2, ssds=[ssd], dram_usable_fraction=0.7)
    return with_reserve(machine("laptop-16gb", source, "rtx4060-laptop", [1], one), display=True)


_COMMON: dict[str, Callable[[], Document]] = {
    "laptop-16gb": _laptop,
    "dgx-spark": lambda: _server("dgx-spark", "gb10", 1),
    "strix-halo": lambda: _server("strix-halo", "radeon8060s", 1),
    "jetson-orin": lambda: _server("jetson-orin", "orin-64gb", 1),
    "jetson-thor": lambda: _server("jetson-thor", "thor-128gb", 1),
    "cpu-only": lambda: cpu_document(2, "4GB", "16GB", "100GB", name="cpu-only"),
}


@functools.cache
def extension_presets() -> dict[str, Callable[[], Document]]:
    """Machines that other distributions add by entry points of `penstock.hardware`: functions that return a document.

    Raises `ExtensionError` as `entries` does.
    """
    return entries("penstock.hardware", lambda name: _own_document(name) is not None)


_FAMILY = re.compile(r"(?P<part>[a-z0-9-]+?)x(?P<count>\d+)(-(?P<complexes>[12])rc)?(-pcie(?P<pcie>[345]))?")
_TOPOLOGY = re.compile(r"mobius-topo(?P<sizes>\d+(\+\d+)*)")
_CLUSTER = re.compile(r"(?P<kind>[a-z0-9-]+?):(?P<hosts>\d+)(-rack(?P<rack>\d+)(-over(?P<over>\d+(\.\d+)?))?)?")


def preset_names() -> list[str]:
    """Names worth listing; families accept other counts too (`rtx4090x3-2rc-pcie3`, `mobius-topo2+6`,
    `h100x8:512-rack32-over4`: 512 servers in racks of 32, whose uplinks have a quarter of the servers' rate)."""
    topologies = ["mobius-topo4", "mobius-topo2+2", "mobius-topo1+3"]
    clusters = ["mics-p3dn:2", "mics-p3dn:8", "mics-p4d:2", "mics-p4d:8"]
    several = [
        f"{part}x{count}{complexes}{slot}"
        for part, slots in (("rtx3090", [""]), ("rtx4090", [""]), ("rtx5090", ["", "-pcie4"]), ("rx7900xtx", [""]))
        for count in (1, 2, 4, 8)
        for complexes in ("", "-2rc")
        for slot in slots
        if count > 1 or not complexes
    ]
    cards = dict.fromkeys([*several, *(f"{part}x1" for part in PARTS)])
    whole = {part: SERVERS[known.server].gpus for part, known in PARTS.items() if known.server is not None}
    servers = [f"{part}x{gpus}" for part, gpus in whole.items() if gpus > 1]
    fleets = ["a100-80gbx8:16", "h100x8:16", "h100x8:128-rack16-over2"]
    return [*topologies, *_PAPERS, *clusters, *cards, *servers, *fleets, *_COMMON, *extension_presets()]


def is_of_a_part(name: str) -> bool:
    """Whether a preset's name is a part and a count."""
    match = _FAMILY.fullmatch(name.partition(":")[0])
    return match is not None and match["part"] in PARTS


def preset_document(name: str) -> Document | None:
    """The document of a preset, None when no preset has that name."""
    return {**extension_presets()[name](), "name": name} if name in extension_presets() else _own_document(name)


def _own_document(name: str) -> Document | None:
    if name in _COMMON:
        return _COMMON[name]()
    paper = _paper_machine(name)
    if paper is not None:
        return paper
    if fleet := _CLUSTER.fullmatch(name):
        return _fleet(name, fleet)
    if "+" in name:
        return _mixed_workstation(name)
    match = _FAMILY.fullmatch(name)
    if match is None or match["part"] not in PARTS:
        return None
    (count,) = _counts(name, [match["count"]])
    if PARTS[match["part"]].server is None:
        pcie = int(match["pcie"]) if match["pcie"] else None
        return _cards(name, match["part"], count, int(match["complexes"] or 1), pcie)
    return None if match["complexes"] or match["pcie"] else _server(name, match["part"], count)


def _fleet(name: str, match: re.Match[str]) -> Document | None:
    """Whole servers with a network; None if they are of no known part."""
    part, _, count = match["kind"].rpartition("x")
    server = SERVERS.get(PARTS[part].server or "") if part in PARTS else None
    if server is None or count != str(server.gpus):
        return None
    (num_hosts,) = _counts(name, [match["hosts"]])
    return _put_in_racks(_servers(name, part, num_hosts), match["rack"], match["over"])


def _paper_machine(name: str) -> Document | None:
    """A paper's machine, None for another name."""
    if name in _PAPERS:
        return _PAPERS[name]()
    if match := _TOPOLOGY.fullmatch(name):
        return _mobius(name, _counts(name, match["sizes"].split("+")))
    match = _CLUSTER.fullmatch(name)
    if match and match["kind"] in _MICS:
        (num_hosts,) = _counts(name, [match["hosts"]])
        document = _MICS[match["kind"]](num_hosts) | {"name": name}
        return _put_in_racks(document, match["rack"], match["over"])
    return None


def _counts(name: str, texts: Iterable[str]) -> list[int]:
    counts = [int(text) for text in texts]
    if not all(0 < count <= MOST for count in counts):
        raise HardwareError(f"hardware preset {name!r}: counts must be 1 to {MOST}, found {counts}")
    return counts


class CopyRates(NamedTuple):
    """Bytes/s from DRAM to a device, back, and between devices; None: not held down."""

    h2d: str | float | None = None
    d2h: str | float | None = None
    link: str | float | None = None


def cpu_document(
    num_devices: int,
    memory: str | int,
    dram: str | int,
    ssd: str | int | None = None,
    threads: int = 1,
    name: str = "cpu",
    hosts: int = 1,
    network: str | float | None = None,
    rates: CopyRates | None = None,
) -> Document:
    """CPU devices with a memory budget each, joined by loopback, divided over hosts in their order. If any of the rates
    is given, transfers are throttled."""
    h2d, d2h, link = rates or CopyRates()
    for what, count in (("num_devices", num_devices), ("threads", threads), ("hosts", hosts)):
        require_count(what, count)
    if hosts > num_devices:
        raise HardwareError(f"hosts={hosts}: found {num_devices} devices, allowed: 1 to {num_devices}, one on each")
    if network is not None and hosts == 1:
        raise HardwareError(f"network={network!r}, but hosts=1: nothing goes over it; say how many, such as hosts=2")
    source = "rates of one core of a 2020s server CPU as a guess; detect with measure=True for this machine's own"
    copy = 10e9  # bytes/s of one thread copying
    down = next((rate for rate in (h2d, d2h) if rate is not None), copy)
    up = next((rate for rate in (d2h, h2d) if rate is not None), copy)
    devices = [
        {
            "name": f"cpu{index}", "kind": "cpu", "host": index * hosts // num_devices, "memory_bytes": memory,
            "usable_fraction": 1.0, "achieved_fraction": 1.0,
            "peak_flops": {"fp32": 80e9 * threads, "bf16": 160e9 * threads, "fp16": 20e9 * threads},
            "memory_bandwidth": 2 * copy, "h2d_bandwidth": down,
            "d2h_bandwidth": up, "link_latency_s": 20e-6, "op_overhead_s": 5e-6, "threads": threads,
        }
        for index in range(num_devices)
    ]  # fmt: skip
    cores = -(-num_devices // hosts) * threads
    one_host: Document = {
        "dram_bytes": dram, "dram_usable_fraction": 1.0, "dram_bandwidth": 40e9,
        "cpu_cores": cores, "optimizer_params_per_s": 1.5e9 * cores,
        "root_complexes": [{"bandwidth_up": 20e9, "bandwidth_down": 20e9}],
        "nvlink_bandwidth": 2e9 if link is None else link, "nvlink_latency_s": 100e-6,
    }  # fmt: skip
    if ssd is not None:
        one_host["ssds"] = [{"size_bytes": ssd, "read_bandwidth": "1GB/s", "write_bandwidth": "0.5GB/s"}]
    throttled = any(rate is not None for rate in (h2d, d2h, link, network))
    document = {"name": name, "source": source, "hosts": [one_host] * hosts, "devices": devices, "throttled": throttled}
    if hosts > 1:
        document["network"] = {"bandwidth": 1e9 if network is None else network, "latency_s": 100e-6}
    return document
