"""The settings of a device's process on its host: cores for the optimizer, and freed memory that stays.

The thread that issues work to a GPU, and those that read and write disks, must never wait for a core that the optimizer
has (Fuyou 4.3: the two are decoupled), else the GPU idles. So the optimizer of a GPU uses all cores of the GPU's share
but those that feed it.

By default the C library gives freed memory back to the kernel, which hands it out again page by page, zeroed: with what
a step of training takes and frees on a CPU device, this costs several per cent of its time. A device's memory is its
own, so the process keeps what it once had.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from ..accelerator import properties_of
from ..nodes import NODES, Nodes, gpu_address

FOR_ISSUING = 2  # cores: one for the thread that issues, one for disks and messages
FEWEST_TO_SPLIT = 4  # a share below this keeps one core free, a single one none
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as in glibc's malloc.h
TRIM_BYTES = 16 << 20
PAGE = mmap.PAGESIZE
_OWN_MAPPING_BYTES = 2**30  # larger blocks are still mapped alone, and unmapped


def available_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def optimizer_cores(cores: Sequence[int], place: int, count: int, most: int | None = None) -> list[int]:
    """The cores for the optimizer of the GPU number `place` of `count` on this host, out of its equal share; at most
    `most`, with which it was measured to be the fastest."""
    assert 0 <= place < count and cores
    share = list(cores[place * len(cores) // count : (place + 1) * len(cores) // count]) or [cores[place % len(cores)]]
    free = FOR_ISSUING if len(share) >= FEWEST_TO_SPLIT else min(1, len(share) - 1)
    return share[free:][:most]


def node_of(device: torch.device, nodes: Nodes = NODES) -> int | None:
    """The node of DRAM and cores that is near a GPU; None for a CPU device, and where all is equally near."""
    if device.type != "cuda" or len(nodes.with_memory) < 2:
        return None
    return nodes.node_of_gpu(gpu_address(properties_of(device)))


def near_cores(node: int, place: int, count: int, nodes: Nodes = NODES) -> tuple[list[int], int, int]:
    """The cores of a GPU's node that this process may use; and the GPU's place among those of the node, and their
    count, for `optimizer_cores`: the `count` GPUs of a host are spread over its nodes evenly, in order."""
    on_node = -(-count // len(nodes.with_memory))
    return nodes.cores(node, available_cores()), place % on_node, on_node


def use_cores(cores: Sequence[int]) -> None:
    """Keep the calling thread, and the threads that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)


def keep_freed_memory() -> bool:
    """From here on, freed blocks wait in this process for their next use. False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _OWN_MAPPING_BYTES), (_TRIM_THRESHOLD, -1))  # never
    return all(mallopt(name, value) == 1 for name, value in settings)


def trim_memory() -> None:
    """Give the kernel back what reading weights, and quantising them, has taken and freed: a step takes less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """The memory of this process that is no file's."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared = file.read().split()[:3]
    return (int(resident) - int(shared)) * PAGE


class Trimmer:
    """Trims the memory of this process at first, and then whenever it has grown by `TRIM_BYTES` and by a sixteenth.

    In a first step each stage's gradients, and the temporaries of its update, get new memory beside those of the stage
    before, which are free: glibc before 2.38 puts small blocks beside aligned ones (`posix_memalign`), and then a free
    block is too small for the next one of its size. Later steps find the blocks of the first.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0

    def trim(self) -> None:
        if resident_bytes() > max(self.kept_bytes + TRIM_BYTES, self.kept_bytes // 16 * 17):
            trim_memory()
            self.kept_bytes = resident_bytes()
