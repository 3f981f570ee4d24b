"""Replacing figures of a whole machine by keyword: dram="4TB", ssds=2, num_devices=8; and devices as a run has shown
them: like their document, but slower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import HardwareError
from ..units import parse_bytes
from .rates import RateTable
from .validation import close_names

if TYPE_CHECKING:
    from .hardware import Device, Hardware

_SHORT = {"dram": "dram_bytes", "memory": "memory_bytes"}
# A device's constant rates, and the kinds of calls in its table for which a new one then holds at every size.
_CONSTANT_FOR = {
    "peak_flops": ("products", "attention"), "achieved_fraction": ("products", "attention"),
    "memory_bandwidth": ("pointwise",),
}  # fmt: skip
MOST = 4096  # devices, disks or threads of a machine
LONGEST = 120  # characters of a value in a machine's source
_TOP_LEVEL = ("name", "source", "network", "failures", "throttled", "fitted_to", "hosts", "devices")
# A data-centre disk on PCIe 4, for machines that had none. Intel P5510 datasheet: 6.5 and 3.4 GB/s, one drive write a
# day over five years.
STOCK_SSD = {
    "size_bytes": "3.84TB", "read_bandwidth": "6.5GB/s", "write_bandwidth": "3.4GB/s", "endurance_bytes": "7.008PB",
}  # fmt: skip


def require_count(what: str, count: object, least: int = 1) -> int:
    """The count. Raises HardwareError for what is no number of devices, disks or threads that a machine has."""
    if type(count) is not int or not least <= count <= MOST:
        raise HardwareError(f"{what}: found {count!r}, allowed: a whole number from {least} to {MOST}")
    return count


def overridden(hardware: Hardware, overrides: dict[str, Any]) -> dict[str, Any]:
    """The machine's document with `overrides` applied; only counts are checked yet."""
    document = hardware.model_dump()
    host_keys = set(type(hardware.hosts[0]).model_fields) - {"root_complexes", "ssds"}
    device_keys = set(type(hardware.devices[0]).model_fields) - {"name", "host", "root_complex"}
    for word in ("num_devices", "threads"):
        if word in overrides:
            require_count(word, overrides[word])
    if "num_devices" in overrides:
        document["devices"] = _resize(document["devices"], overrides["num_devices"], len(document["hosts"]))
    if not overrides.keys().isdisjoint(("num_devices", "threads")):
        _share_cores(document, overrides.get("threads"))
    for word, value in overrides.items():
        key = _SHORT.get(word, word)
        if key == "num_devices":
            continue
        if key == "ssds":
            for host in document["hosts"]:
                host["ssds"] = _disks(host["ssds"], value)
        elif key == "root_complex_bandwidth":
            for host in document["hosts"]:
                complex_ = {"bandwidth_up": value, "bandwidth_down": value}
                host["root_complexes"] = [complex_] * len(host["root_complexes"])
        elif key in host_keys or key in device_keys:
            if key == "memory_bytes":
                _leave_reserve_outside(document["devices"], value)
            for part in document["hosts" if key in host_keys else "devices"]:
                part[key] = value
                if key in _CONSTANT_FOR:
                    part["rates"] = _drop_kinds(part["rates"], *_CONSTANT_FOR[key])
        elif key in _TOP_LEVEL:
            document[key] = value
        else:
            known = [*_SHORT, "num_devices", "ssds", "root_complex_bandwidth", *host_keys, *device_keys, *_TOP_LEVEL]
            raise HardwareError(f"cannot override {word!r}{close_names(word, known)}")
    if "source" not in overrides:
        changes = ", ".join(f"{word}={_short(value)}" for word, value in overrides.items())
        document["source"] = f"{document['source'].rstrip('. ')}; changed: {changes}"
    return document


def _leave_reserve_outside(devices: list[dict[str, Any]], value: object) -> None:
    """A plan that is held to part of a GPU's memory leaves a rest: where that holds the reserve, the part has none."""
    for device in devices:
        reserve = device["reserve"]
        if reserve is not None and parse_bytes(value) + sum(reserve.values()) <= device["memory_bytes"]:
            device["reserve"] = None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _drop_kinds(table: dict[str, Any] | None, *kinds: str) -> dict[str, Any] | None:
    """The rest of a table of rates."""
    kept = {kind: rates for kind, rates in (table or {}).items() if kind not in kinds and rates}
    return kept if kept.keys() - {"source"} else None


def _resize(devices: list[dict[str, Any]], count: int, num_hosts: int) -> list[dict[str, Any]]:
    """The first `count` devices; if there are fewer, all of them and then copies of them in the same order."""
    if num_hosts > 1:
        raise HardwareError(f"num_devices: this machine has {num_hosts} hosts; write its devices in a document instead")
    taken, prefix = {device["name"] for device in devices}, devices[0]["name"].rstrip("0123456789")
    free = (name for i in range(count + len(devices)) if (name := f"{prefix}{i}") not in taken)
    more = [{**devices[i % len(devices)], "name": next(free)} for i in range(len(devices), count)]
    return devices[:count] + more


def _share_cores(document: dict[str, Any], threads: int | None) -> None:
    """Give the CPU devices of measured hosts equal shares of the cores, or `threads` each, and the rates measured with
    the nearest number of threads. Work that many threads do alike takes half of the time with twice the threads."""
    for index, host in enumerate(document["hosts"]):
        own = [device for device in document["devices"] if device["kind"] == "cpu" and device["host"] == index]
        if not (own and host["cpu_rates"]):
            continue
        count = threads or max(1, host["cpu_cores"] // len(own))
        nearest = min(host["cpu_rates"], key=lambda known: abs(math.log(known["threads"] / count)))
        factor = count / nearest["threads"]
        scaled = {
            "peak_flops": {dtype: rate * factor for dtype, rate in nearest["peak_flops"].items()},
            "memory_bandwidth": nearest["memory_bandwidth"] * factor,
            "rates": nearest["rates"] and RateTable.model_validate(nearest["rates"]).scaled(factor).model_dump(),
            "threads": count,
        }
        for device in own:
            device |= nearest | scaled


def _disks(disks: list[dict[str, Any]], value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    count = require_count("ssds", value, least=0)
    like = {**(disks[0] if disks else STOCK_SSD), "directory": None}  # no two disks have a directory in common
    return [*disks[:count], *(like for _ in range(count - len(disks)))]


def slower(device: Device, times: float) -> Device:
    """The device when all that it computes takes `times` as long."""
    changed = {
        "peak_flops": {dtype: rate / times for dtype, rate in device.peak_flops.items()},
        "memory_bandwidth": device.memory_bandwidth / times,
        "op_overhead_s": device.op_overhead_s * times,
        "rates": None if device.rates is None else device.rates.scaled(1 / times),
    }
    return device.model_copy(update=changed)


def with_slower(hardware: Hardware, times: Mapping[int, float]) -> Hardware:
    """The machine when the computation of these devices takes `times` as long."""
    devices = [slower(d, times[i]) if i in times else d for i, d in enumerate(hardware.devices)]
    return hardware.model_copy(update={"devices": devices})
