"""NUMA nodes: the memory and the cores that are near a GPU, and large pages.

A host has one node for each socket. A copy between a GPU and DRAM of the other socket, or an optimizer whose
states are there, passes the link between sockets, which is slower than either. So buffers of a GPU's process are asked
for on the node of the GPU's root complex, and its threads that work on them are kept to that node's cores. Where there
is one node only, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFERRED = 1  # as in linux/mempolicy.h: other nodes are taken when this one is full, where binding would kill
_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
HUGE_PAGE_BYTES = 1 << 21


def _mbind(address: int, num_bytes: int, node: int) -> bool:
    """Ask for the untouched pages of a range on a node. False if the kernel refuses."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    given = (ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_ulong(_PREFERRED), mask)
    return bool(call(ctypes.c_long(number), *given, ctypes.c_ulong(64 * words + 1), ctypes.c_uint(0)) == 0)


@dataclass(frozen=True)
class Nodes:
    """The nodes that the kernel describes under `system`, usually /sys. `bind` asks for pages on a node."""

    system: Path = Path("/sys")
    bind: Callable[[int, int, int], bool] = _mbind

    @property
    def with_memory(self) -> list[int]:
        """The numbers of the nodes that have memory; none where the kernel knows of none."""
        path = self.system / "devices/system/node/has_memory"
        return _numbers(path.read_text()) if path.is_file() else []

    def node_of_gpu(self, address: str) -> int | None:
        """The node of the root complex above a GPU with this PCI address ("0000:3b:00.0"). None where there is but one
        node, or the kernel does not know."""
        path = self.system / "bus/pci/devices" / address / "numa_node"
        nodes = self.with_memory
        if len(nodes) < 2 or not path.is_file():
            return None
        node = int(path.read_text())
        return node if node in nodes else None

    def cores(self, node: int | None, allowed: Sequence[int]) -> list[int]:
        """Those of the allowed cores that are of a node; all of them for None, and where it has none of them."""
        path = self.system / f"devices/system/node/node{node}/cpulist"
        if node is None or not path.is_file():
            return list(allowed)
        own = set(_numbers(path.read_text()))
        return [core for core in allowed if core in own] or list(allowed)

    def place(self, address: int, num_bytes: int, node: int | None) -> bool:
        """Ask for the pages of a buffer that nothing was written to yet on a node. False where nothing was done."""
        return node is not None and self.bind(address, num_bytes, node)


NODES = Nodes()


def map_pages(num_bytes: int) -> mmap.mmap:
    """Zeros of this process alone, in large pages where the kernel has them: a copy or a step passes over gigabytes,
    which in pages of 4 KiB costs a miss of the address cache every 4 KiB."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def gpu_address(properties: Any) -> str:
    """The PCI address of a GPU with these properties."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _numbers(text: str) -> list[int]:
    """The numbers that a text such as "0-3,8" stands for."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1) if first else ()
    return found
