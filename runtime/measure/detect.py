"""Describing the machine at hand: GPUs through torch, NVML and amdsmi, their slots through /sys, else psutil.

Without `measure` the rates come from datasheets of known parts or from the CPU's instruction set, and `source` says so.
With it, child processes time them (`measure/cpu.py`, `measure/cuda.py`).
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from ...ir.errors import HardwareError
from ...ir.machine.call_mix import FP8
from ...ir.machine.gpu_parts import PARTS
from ...ir.machine.hardware import Hardware
from ...ir.machine.presets import PCIE_X16, SHARED_CAP, SHARED_DEVICE, gpu, stated_reserve
from ...ir.machine.spelling import bare_name, parts_like
from ...ir.program import connections_of_group
from ..accelerator import links_bandwidth, require_known_gpus
from ..children import start_module
from ..ssd.folder import free_space
from .disks import disk_directories

MEASURE_TIMEOUT_S = 120.0
PCI = Path("/sys/bus/pci/devices")
MEMORY_LESS = 0.15  # of a card with ECC, or with a part of it for the system


def detect_hardware(measure: bool = False) -> Hardware:
    """This machine as a document: its CUDA devices, or CPU devices when it has none.

    Memory is shared out so that everything fits: CPU devices and DRAM get half each of four fifths of the RAM. Each
    disk with a directory that takes files counts as an SSD of the size that is free there.
    Raises HardwareError when a measurement fails or hangs, and for GPUs that the device runtime cannot use.
    """
    require_known_gpus()
    document = _gpu_document() if torch.cuda.is_available() else _cpu_document()
    directories = disk_directories()
    document["hosts"][0]["ssds"] = [
        {"size_bytes": free_space(Path(directory)), "read_bandwidth": 1e9, "write_bandwidth": 0.5e9}
        | {"directory": directory}
        for directory in directories
    ]
    if measure:
        (_measure_gpus if torch.cuda.is_available() else _measure_cpus)(document, directories)
        document["source"] = document["source"].split(";")[0] + "; all rates measured"
    return Hardware.model_validate(document)


def spans_hosts() -> bool:
    """Whether this process is a rank of a torchrun over several hosts."""
    world = os.environ.get("WORLD_SIZE", "1")
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", world) != world


# -- the host ----------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes(root: Path = Path("/")) -> int:
    """RAM of the machine, or the least of the limits that this process is confined to: of its control group, of those
    above, and its own. `root`: of the file system that tells of groups."""
    return min([psutil.virtual_memory().total, *_group_limits(root), *_own_limits()])


def _group_limits(root: Path) -> Iterator[int]:
    """In bytes. The group of `/proc/self/cgroup` may be seen from outside, in a container that has its top alone."""
    known = root / "proc/self/cgroup"
    for line in known.read_text().splitlines() if known.is_file() else ():
        number, kinds, path = line.split(":", 2)
        top, name = root / "sys/fs/cgroup", "memory.max"
        if "memory" in kinds.split(","):
            top, name = top / "memory", "memory.limit_in_bytes"
        elif number != "0":
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                limit = (folder / name).read_text().strip()
                yield from [int(limit)] if limit.isdigit() else []


def _own_limits() -> Iterator[int]:
    """In bytes: what a process may still take of addresses and of data, beside what this one has."""
    taken = psutil.Process().memory_info()
    for kind, taken_bytes in ((resource.RLIMIT_AS, taken.vms), (resource.RLIMIT_DATA, taken.data)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - taken_bytes)


def cpu_peak_flops(threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, float]:
    """Guessed FLOP/s of `threads` cores: clock times the width of the instruction set's multiply-adds."""
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    flags = set((re.search(r"^flags\s*:(.*)$", text, re.MULTILINE) or ["", ""])[1].split())
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    per_cycle = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    fp32 = (float(clock[1]) * 1e6 if clock else 2.5e9) * per_cycle * threads
    bf16 = 4 * fp32 if "amx_bf16" in flags else 2 * fp32 if "avx512_bf16" in flags else fp32 / 4
    return {"fp32": fp32, "bf16": bf16, "fp16": 2 * fp32 if "avx512_fp16" in flags else fp32 / 4}


def _host(dram_bytes: int, usable_fraction: float) -> dict[str, Any]:
    cores = usable_cores()
    dram_bandwidth = min(20e9 * cores, 200e9)
    return {
        "dram_bytes": dram_bytes, "dram_usable_fraction": usable_fraction, "dram_bandwidth": dram_bandwidth,
        "cpu_cores": cores, "optimizer_params_per_s": min(1.5e9 * cores, 0.6 * dram_bandwidth / 28),
    }  # fmt: skip


def _cpu_document() -> dict[str, Any]:
    cores = usable_cores()
    num_devices = max(1, min(cores, 4))
    threads, half_bytes = cores // num_devices, int(0.4 * ram_bytes())
    device = {
        "kind": "cpu", "memory_bytes": half_bytes // num_devices, "usable_fraction": 1.0, "threads": threads,
        "peak_flops": cpu_peak_flops(threads), "achieved_fraction": 0.6, "memory_bandwidth": 20e9,
        "h2d_bandwidth": 10e9, "d2h_bandwidth": 10e9, "link_latency_s": 20e-6, "op_overhead_s": 5e-6,
    }  # fmt: skip
    host = _host(half_bytes, 1.0) | {
        "root_complexes": [{"bandwidth_up": 10e9 * num_devices, "bandwidth_down": 10e9 * num_devices}],
        "nvlink_bandwidth": 2e9, "nvlink_latency_s": 100e-6,
    }  # fmt: skip
    return {
        "name": f"this-machine-{num_devices}xcpu",
        "source": "sizes from this machine; rates guessed from its instruction set, not measured",
        "hosts": [host],
        "devices": [{"name": f"cpu{index}", **device} for index in range(num_devices)],
    }


# -- GPUs --------------------------------------------------------------------------------------------------------------


def known_part(driver_name: str, memory_bytes: int | None = None) -> str | None:
    """Name of the preset part for a GPU's name as the driver reports it, None when its datasheet is not known. What a
    driver counts is up to `MEMORY_LESS` apart from a datasheet's memory; a part with another memory is another part."""
    parts = parts_like(bare_name(driver_name.rpartition("/")[2]))
    if memory_bytes is not None:
        parts = [part for part in parts if abs(memory_bytes / (PARTS[part].gib * 2**30) - 1) < MEMORY_LESS]
    return parts[0] if parts else None


def pci_address(properties: Any) -> str | None:
    """ "0000:3b:00.0" from torch's device properties, None when torch does not tell."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def slot_bandwidth(address: str | None, pci: Path) -> float:
    """Usable bytes/s per direction of a PCI device's slot, from the narrower of the device and the port above it.

    If /sys does not say (virtual machines), this is the rate of generation 3 with 16 lanes.
    """
    if address is None or not (pci / address).exists():
        return PCIE_X16[3]
    device = (pci / address).resolve()
    rates = []
    for node in (device, device.parent):
        speed, width = (node / "max_link_speed"), (node / "max_link_width")
        if speed.is_file() and width.is_file():
            gigatransfers = re.match(r"([\d.]+) GT/s", speed.read_text())
            lanes = int(width.read_text())
            if gigatransfers and 0 < lanes <= 32:
                encoding = 0.8 if float(gigatransfers[1]) <= 5 else 128 / 130
                rates.append(float(gigatransfers[1]) * 1e9 / 8 * encoding * lanes * 0.83)
    return min(rates, default=PCIE_X16[3])


def root_port(address: str | None, pci: Path) -> str:
    """The part of the device's way to DRAM that it shares with others: the root port's address, else its NUMA node,
    else "unknown"."""
    if address is None or not (pci / address).exists():
        return "unknown"
    ports = [part for part in (pci / address).resolve().parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:\S+", part)]
    if len(ports) > 1:
        return ports[0]
    numa = pci / address / "numa_node"
    return f"node {numa.read_text().strip()}" if numa.is_file() else "unknown"


def _unknown_part(properties: Any) -> dict[str, Any]:
    """Guesses for a GPU without a datasheet here: cores per processor and clock by torch's account."""
    cores = properties.multi_processor_count * (64 if properties.major == 7 else 128)
    fp32 = 2.0 * cores * getattr(properties, "clock_rate", 1.5e6) * 1e3  # kHz
    peak = {"fp32": fp32, "fp16": 2 * fp32} | ({"bf16": 2 * fp32} if properties.major >= 8 else {})
    peak |= {FP8: 4 * fp32} if _has_float8(properties) else {}
    clock_khz, bits = getattr(properties, "memory_clock_rate", 7e6), getattr(properties, "memory_bus_width", 256)
    return {"peak_flops": peak, "achieved_fraction": 0.7, "memory_bandwidth": 2e3 * clock_khz * bits / 8}


def _has_float8(properties: Any) -> bool:
    """Whether torch multiplies float8 on a GPU: from compute capability 8.9 on, or from CDNA 3 on."""
    if torch.version.hip:
        return str(getattr(properties, "gcnArchName", "")).startswith(("gfx94", "gfx95", "gfx12"))
    return (properties.major, getattr(properties, "minor", 0)) >= (8, 9)


def _shares_ram(properties: Any) -> bool:
    """Whether a GPU's memory is the RAM; an integrated GPU with more than all of it has memory set apart at start."""
    return bool(getattr(properties, "is_integrated", 0)) and properties.total_memory <= psutil.virtual_memory().total


def _gpu_document() -> dict[str, Any]:
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    addresses = [pci_address(each) for each in properties]
    ports = [root_port(address, PCI) for address in addresses]
    complexes = sorted(set(ports))
    devices, unknown = [], []
    for index, (each, address) in enumerate(zip(properties, addresses, strict=True)):
        part, link = known_part(each.name, each.total_memory), slot_bandwidth(address, PCI)
        if part is None:
            unknown.append(each.name)
        figures = _part_figures(part) if part else _unknown_part(each)
        devices.append(
            {"name": f"gpu{index}", "kind": "cuda", "root_complex": complexes.index(ports[index]),
             "memory_bytes": each.total_memory, "h2d_bandwidth": link, "d2h_bandwidth": link,
             "reserve": stated_reserve(count, part is None or PARTS[part].is_card, each.total_memory), **figures}
        )  # fmt: skip
    widest = [max(d["h2d_bandwidth"] for d in devices if d["root_complex"] == c) for c in range(len(complexes))]
    # Bridges that join only pairs leave some devices without access to others: then there is no link between all.
    p2p = count > 1 and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
    host = _host(ram_bytes(), 0.8) | {
        "root_complexes": [{"bandwidth_up": rate, "bandwidth_down": rate} for rate in widest],
        "p2p": p2p,
        "nvlink_bandwidth": links_bandwidth(0, properties[0].major) if p2p else None,
    }
    if count == 1 and _shares_ram(properties[0]):
        (device,) = devices
        copy = device["memory_bandwidth"] / 2  # reads and writes the one memory
        device |= {"memory_bytes": min(device["memory_bytes"], ram_bytes()), "usable_fraction": SHARED_DEVICE}
        device |= {"h2d_bandwidth": copy, "d2h_bandwidth": copy}
        host |= {"shared_memory": True, "dram_usable_fraction": SHARED_CAP}
        host["root_complexes"] = [{"bandwidth_up": copy, "bandwidth_down": copy}]
    guessed = f", guessed for {', '.join(sorted(set(unknown)))}" if unknown else ""
    return {
        "name": f"this-machine-{count}xcuda",
        "source": f"sizes and slots from this machine; rates from datasheets{guessed}, not measured",
        "hosts": [host], "devices": devices,
    }  # fmt: skip


def _part_figures(name: str) -> dict[str, Any]:
    keys = ("peak_flops", "achieved_fraction", "memory_bandwidth", "rates")
    return {key: gpu(name, 0)[key] for key in keys}


# -- measuring ---------------------------------------------------------------------------------------------------------


def run_children(
    module: str,
    arguments: list[list[str]],
    threads: int,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list[dict[str, Any]]:
    """Run `python -m penstock.runtime.measure.MODULE` once per argument list, all at once; the JSON that each printed.

    `environment`: what it has beside this process's; by default the threads and the waiting of workers. Raises
    HardwareError with a child's error output when one fails, or when they take more than `timeout_s`. Leaves no child
    running.
    """
    package = __package__
    limit_s = MEASURE_TIMEOUT_S if timeout_s is None else timeout_s
    if environment is None:
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        environment = {**count, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    children = [
        start_module(
            f"{package}.{module}", each,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, environment=environment,
        )
        for each in arguments
    ]  # fmt: skip
    deadline = time.monotonic() + limit_s
    reports = []
    try:
        for child in children:
            output, complaint = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if child.returncode != 0:
                raise HardwareError(f"measuring failed in {module} (exit {child.returncode}):\n{complaint[-2000:]}")
            reports.append(json.loads(output.splitlines()[-1], parse_float=_four_digits))
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"measuring took more than {limit_s:.0f} s in {module}") from error
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    return reports


def _four_digits(text: str) -> float:
    return float(f"{float(text):.4g}")  # a measurement is worth no more, and the document stays readable


def _set_disks(document: dict[str, Any], report: dict[str, Any]) -> None:
    document["hosts"][0]["ssd_shares"] = report["disk_shares"]
    for ssd, rates in zip(document["hosts"][0]["ssds"], report["disks"], strict=True):
        ssd |= {
            "read_bandwidth": rates["disk_read"], "write_bandwidth": rates["disk_write"],
            "latency_s": rates["disk_latency_s"],
        }  # fmt: skip


def _measure_cpus(document: dict[str, Any], directories: list[str]) -> None:
    """Rates of the document's devices, all at once, and those of one device with all cores."""
    devices, host = document["devices"], document["hosts"][0]
    threads, cores = devices[0]["threads"], host["cpu_cores"]
    reports = _timed_cpus(len(devices), threads, cores, directories)
    by_threads = {threads: _common_rates(reports, threads)}
    if cores != threads:
        by_threads[cores] = _common_rates([reports[0]["all_cores"]], cores)
    for device, report in zip(devices, reports, strict=True):
        device |= _common_rates([report], threads) | {"achieved_fraction": 1.0}
    copies = sum(rates["copy"] for rates in reports)
    host |= {
        "dram_bandwidth": 2 * copies,
        "root_complexes": [{"bandwidth_up": copies, "bandwidth_down": copies}],
        "optimizer_params_per_s": sum(rates["adamw"] for rates in reports),
        "cpu_rates": list(by_threads.values()),
    }
    if "link" in reports[0]:
        host |= _fabric_fields(reports[0])
    _set_disks(document, reports[0])


def _fabric_fields(report: dict[str, Any]) -> dict[str, Any]:
    """The fields of a host for what joins its devices, as measured between two of them."""
    return {
        "nvlink_bandwidth": report["link"], "nvlink_latency_s": report["link_latency_s"],
        "nvlink_message_shares": report["link_shares"],
    }  # fmt: skip


def _timed_cpus(count: int, threads: int, cores: int, directories: list[str]) -> list[dict[str, Any]]:
    """The reports of `count` devices of `threads` threads that are timed at the same time, and of one with `cores`."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [[str(rank), str(count), str(threads), str(cores), rendezvous, *directories] for rank in range(count)]
        return run_children("cpu", ranks, threads)


def _common_rates(reports: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """The rates of each of several equal devices: the mean of their reports."""
    table, copy = mean_of([report["rates"] for report in reports]), mean_of([report["copy"] for report in reports])
    return {
        "threads": threads,
        "peak_flops": _highest(table),
        "memory_bandwidth": sorted(table["pointwise"].values())[len(table["pointwise"]) // 2],
        "h2d_bandwidth": copy, "d2h_bandwidth": copy,
        "link_latency_s": mean_of([report["copy_latency_s"] for report in reports]),
        "op_overhead_s": mean_of([report["op_overhead_s"] for report in reports]),
        "rates": {"source": f"measured with {len(reports)} devices of {threads} threads at once", **table},
    }  # fmt: skip


def _highest(table: dict[str, Any]) -> dict[str, float]:
    """The highest measured FLOP/s of each dtype, which is all that is known of a device's peak."""
    curves = [(dtype, curve) for dtype, curve in table["products"].items()]
    curves += [(d, row[way]) for row in table["attention"] for d in row["dtypes"] for way in ("forward", "backward")]
    return {dtype: max(max(curve.values()) for name, curve in curves if name == dtype) for dtype in table["products"]}


def mean_of(reports: list[Any]) -> Any:
    """The mean of equal documents, number by number; a size that one of them lacks is left out."""
    first = reports[0]
    if isinstance(first, dict):
        keys = [key for key in first if all(key in report for report in reports)]
        return {key: mean_of([report[key] for report in reports]) for key in keys}
    if isinstance(first, list):
        return [mean_of(list(rows)) for rows in zip(*reports, strict=True)]
    return first if isinstance(first, str) else _four_digits(str(sum(reports) / len(reports)))


def _measure_gpus(document: dict[str, Any], directories: list[str]) -> None:
    devices, host = document["devices"], document["hosts"][0]
    groups: list[list[int]] = [[] for _ in host["root_complexes"]]
    for index, device in enumerate(devices):
        groups[device["root_complex"]].append(index)
    (report,) = run_children("cuda", [[json.dumps(groups), *directories]], host["cpu_cores"])
    for device, rates, reserve in zip(devices, report["devices"], report["reserves"], strict=True):
        table = {"source": "measured", **rates["rates"]}
        peak = _highest(table)
        peak |= {FP8: 2 * peak["bf16"]} if FP8 in device["peak_flops"] else {}  # not measured
        device |= {
            "peak_flops": peak, "rates": table,
            "achieved_fraction": 1.0, "memory_bandwidth": rates["memory"], "h2d_bandwidth": rates["h2d"],
            "d2h_bandwidth": rates["d2h"], "link_latency_s": rates["copy_latency_s"],
            "op_overhead_s": rates["op_overhead_s"], "reserve": device["reserve"] | {"display_bytes": 0} | reserve,
        }  # fmt: skip
    host |= {
        "root_complexes": [
            {"bandwidth_up": up, "bandwidth_down": down, "bandwidth_both": both}
            for up, down, both in zip(report["up"], report["down"], report["both"], strict=True)
        ],
        "dram_bandwidth": 2 * report["host"]["copy"],
        "optimizer_params_per_s": report["host"]["adamw"],
        "optimizer_threads": report["host"]["adamw_threads"],
    }
    if host["nvlink_bandwidth"] is not None and "peer" in report:
        host |= _fabric_fields(report["peer"])
    if len(devices) > 1:
        host["communicators"] = _communicator_memory(len(devices), host["cpu_cores"])
    _set_disks(document, report)


def _communicator_memory(count: int, cores: int) -> dict[str, int]:
    """The fields of a `CommunicatorMemory`, from a process for each of `count` GPUs, as they train."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [[str(rank), str(count), str(Path(folder) / "rendezvous")] for rank in range(count)]
        reports = run_children("communicators", ranks, max(1, cores // count))
    rest_bytes = max(report["rest"] for report in reports)
    group_bytes = max(report["gather"] + report["sums"] for report in reports)
    return {
        "library_bytes": max(0, max(report["first"] for report in reports) - rest_bytes), "rest_bytes": rest_bytes,
        "sender_bytes": reports[0]["message"], "receiver_bytes": reports[1]["message"],
        "group_bytes": -(-group_bytes // connections_of_group(count)),
    }  # fmt: skip
