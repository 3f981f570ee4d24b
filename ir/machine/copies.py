"""Many equal hosts, written once: the key `copies` of a hardware document.

`copies: 128` says that the hosts and devices of the document are there 128 times. Devices are named by a word and
numbers from 0 on, which go on in the copies: gpu0 to gpu7, gpu8 to gpu15, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import HardwareError

if TYPE_CHECKING:
    from .hardware import Hardware

KEY = "copies"
MOST = 100_000
_NAME = re.compile(r"(?P<word>.*?)(?P<number>\d+)")


def taken_out(document: Any) -> tuple[Any, int]:
    """A document without the key, and the number of copies that it asks for."""
    if not isinstance(document, Mapping) or KEY not in document:
        return document, 1
    copies = document[KEY]
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= MOST:
        raise HardwareError(f"{KEY}: found {copies!r}, allowed: a whole number from 1 to {MOST:,}")
    return {key: value for key, value in document.items() if key != KEY}, copies


def multiply(hardware: Hardware, copies: int) -> Hardware:
    """The machine with `copies` copies of its hosts and devices. Raises `HardwareError` for names that do not go on."""
    if copies == 1:
        return hardware
    word, own, here = _word(hardware), hardware.devices, len(hardware.hosts)
    if word is None:
        names = ", ".join(device.name for device in own[:3])
        raise HardwareError(
            f"{KEY}: {copies} of devices named {names}; allowed: one word and numbers from 0 on, such as gpu0, gpu1"
        )
    devices = [
        device.model_copy(update={"name": f"{word}{number * len(own) + i}", "host": number * here + device.host})
        for number in range(copies)
        for i, device in enumerate(own)
    ]
    return hardware.model_copy(update={"hosts": list(hardware.hosts) * copies, "devices": devices})


def copies_in(hardware: Hardware) -> int:
    """The number of equal hosts, each with the same devices; 1 if they differ."""
    copies = len(hardware.hosts)
    if copies == 1 or len(hardware.devices) % copies or _word(hardware) is None:
        return 1
    here, first = len(hardware.devices) // copies, hardware.hosts[0]
    if any(device.host != i // here for i, device in enumerate(hardware.devices)):
        return 1
    looks = [(kind, device.root_complex) for kind, device in zip(hardware.device_kinds, hardware.devices)]
    same_hosts = all(host is first or host == first for host in hardware.hosts)
    return copies if same_hosts and looks == looks[:here] * copies else 1


def first_of(hardware: Hardware, copies: int) -> Hardware:
    """The first of the machine's `copies` copies."""
    if copies == 1:
        return hardware
    fields = {name: getattr(hardware, name) for name in type(hardware).model_fields}  # without what was derived of them
    for name in ("hosts", "devices"):
        fields[name] = fields[name][: len(fields[name]) // copies]
    return type(hardware).model_construct(**fields)


def _word(hardware: Hardware) -> str | None:
    """The word that all devices are named by, with their numbers in order."""
    match = _NAME.fullmatch(hardware.devices[0].name)
    word = match["word"] if match else ""
    numbered = all(device.name == f"{word}{i}" for i, device in enumerate(hardware.devices))
    return word if word and numbered else None
