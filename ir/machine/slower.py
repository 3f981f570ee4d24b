"""A device as a run has shown it: like its document, but slower."""

from __future__ import annotations

from collections.abc import Mapping

from .hardware import Device, Hardware


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
