"""The user's own copy of the model: the memory that it takes where the plan's programs run, which no plan may use.

A model on the meta device takes none. A copy in DRAM that is the devices' memory counts as theirs. Under torchrun, and
so on several hosts, every device's process has a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..ir.machine.hardware import Hardware
from ..runtime.quantised.model import with_bytes


def own_copy_bytes(model: Any) -> dict[str, int]:
    """Bytes of the model's parameters and buffers on each torch device ("cpu", "cuda:0"), shared storages once."""
    found: dict[str, int] = defaultdict(int)
    if not isinstance(model, nn.Module):
        return {}  # `compile` says so
    model = with_bytes(model)  # also what a library keeps beside its parameters
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta and t.layout is torch.strided]
    for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values():
        found[str(storage.device)] += storage.nbytes()
    return dict(found)


def reserve_own_copy(hardware: Hardware, model: nn.Module) -> Hardware:
    """The hardware less the memory that the model takes if this script runs there: on one host in one process."""
    own = own_copy_bytes(model)
    copies = [own] * hardware.num_devices if len(hardware.hosts) > 1 else [own]
    return reserve_copies(hardware, copies)


def reserve_copies(hardware: Hardware, copies: Sequence[Mapping[str, int]]) -> Hardware:
    """The hardware less the memory of the copies that the processes of its first devices hold."""
    on_host, on_gpu = [0] * len(hardware.hosts), dict[tuple[int, int], int]()
    for device, copy in zip(hardware.devices, copies):
        for place, num_bytes in copy.items():
            kind, _, index = place.partition(":")
            if kind == "cuda" or hardware.hosts[device.host].shared_memory:
                key = device.host, int(index or 0)
                on_gpu[key] = on_gpu.get(key, 0) + num_bytes
            else:
                on_host[device.host] += num_bytes
    hosts = [h.model_copy(update={"model_bytes": n}) for h, n in zip(hardware.hosts, on_host, strict=True)]
    devices, seen = [], defaultdict[int, int](int)
    for device in hardware.devices:
        counts = device.kind == "cuda" or hardware.hosts[device.host].shared_memory
        num_bytes = on_gpu.get((device.host, seen[device.host]), 0) if counts else 0
        seen[device.host] += counts
        devices.append(device.model_copy(update={"model_bytes": num_bytes}))
    fields = {name: getattr(hardware, name) for name in type(hardware).model_fields}
    return Hardware(**{**fields, "hosts": hosts, "devices": devices})  # a copy would take cached budgets along
