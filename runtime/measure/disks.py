"""Disks of the machine at hand: a directory on each that takes files, and its rates by the runtime's own I/O."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ...ir.errors import HardwareError
from ..ssd.directory import check_directory
from ..ssd.file import SsdFile
from ..ssd.folder import SsdFolder, free_space

LEAST_FREE_BYTES = 1 << 30  # a disk with less free space is not worth planning for
DISK_S = 0.6  # of writing, and as much of reading
BLOCK_BYTES = 32 << 20
MOST_BYTES = 8 << 30
DEVICES = Path("/sys/dev/block")


def disk_directories(places: Iterable[str | Path] | None = None) -> list[str]:
    """For each disk, the first of `places` that this user may write, past the page cache too; none is in memory.

    Places are the temporary directory, the current one, the home, and where disks are mounted.
    """
    found: dict[object, str] = {}
    for place in _places() if places is None else places:
        directory = Path(place).resolve()
        try:
            disk = disk_of(check_directory(directory).st_dev)
            if disk not in found and is_usable(directory):
                found[disk] = str(directory)
        except (HardwareError, OSError):
            continue  # not a place for files: another one may be
    return list(found.values())


def _places() -> Iterator[str | Path]:
    yield from (tempfile.gettempdir(), Path.cwd(), Path.home())
    for part in psutil.disk_partitions(all=False):
        yield part.mountpoint


def is_usable(directory: Path) -> bool:
    """Whether a run could put its files there; tried by making and removing its folder."""
    if not os.access(directory, os.W_OK) or free_space(directory) < LEAST_FREE_BYTES:
        return False
    try:
        SsdFolder([directory], "look").close()
    except HardwareError:
        return False
    return True


def disk_of(device: int, devices: Path = DEVICES) -> object:
    """A key of the whole disk that a file system's device number belongs to: partitions of one disk share it."""
    node = devices / f"{os.major(device)}:{os.minor(device)}"
    if not node.exists():
        return device
    real = node.resolve()
    return str(real.parent if (real / "partition").is_file() else real)


def disk_rates(directory: str | Path, slice_s: float = DISK_S, block_bytes: int = BLOCK_BYTES) -> dict[str, float]:
    """Bytes per second that the runtime writes to and reads from a disk, and the seconds of a read of one page.

    Takes about twice `slice_s`. Leaves no file. Raises `HardwareError` if the directory takes no files,
    `DoesNotFit` if it has no room for a few blocks.
    """
    folder = SsdFolder([directory], "measure")
    try:
        blocks = max(2, min(MOST_BYTES, free_space(Path(directory)) // 4) // block_bytes)
        file = folder.reserve("rates", blocks * block_bytes)
        block = torch.frombuffer(mmap.mmap(-1, block_bytes), dtype=torch.uint8)  # aligned as O_DIRECT demands
        block.copy_(torch.randint(0, 256, (block_bytes,), dtype=torch.uint8))  # some disks compress
        write, written = _rate(file.write, block, range(blocks), slice_s)
        read, _ = _rate(file.read, block, itertools.cycle(range(written)), slice_s)
        page_s = _page_s(file, block[: mmap.PAGESIZE], written * block_bytes)
        return {"disk_write": write, "disk_read": read, "disk_latency_s": page_s}
    finally:
        folder.close()


def rates_of_disks(directories: Sequence[str | Path], slice_s: float = DISK_S) -> dict[str, Any]:
    """The rates of each disk, one after the other, and the share of their sums that all reach at once, as a curve by
    the number of disks; no curve for one disk."""
    alone = [disk_rates(directory, slice_s) for directory in directories]
    if len(alone) < 2:
        return {"disks": alone, "disk_shares": None}
    with ThreadPoolExecutor(len(alone)) as pool:
        together = list(pool.map(lambda directory: disk_rates(directory, slice_s), directories))
    return {"disks": alone, "disk_shares": {1: 1.0, len(alone): together_share(alone, together)}}


def together_share(alone: Sequence[Mapping[str, float]], together: Sequence[Mapping[str, float]]) -> float:
    """The share of their rates, at most 1, that disks reach when all are busy: the mean of reading and writing."""
    shares = [sum(row[way] for row in together) / sum(row[way] for row in alone) for way in ("disk_read", "disk_write")]
    return min(1.0, float(f"{sum(shares) / 2:.3g}"))


def _rate(
    move: Callable[[int, Tensor], None], block: Tensor, places: Iterable[int], slice_s: float
) -> tuple[float, int]:
    """Bytes per second over the slice, and the number of blocks that were moved."""
    count, began_s = 0, time.perf_counter()
    for place in places:
        move(place * len(block), block)
        count += 1
        if time.perf_counter() > began_s + slice_s:
            break
    return count * len(block) / (time.perf_counter() - began_s), count


def _page_s(file: SsdFile, page: Tensor, num_bytes: int, reads: int = 64) -> float:
    """Median seconds of the read of one page, each far from the last."""
    taken = []
    for i in range(reads):
        began_s = time.perf_counter()
        file.read(i * 17 * 64 * len(page) % num_bytes, page)
        taken.append(time.perf_counter() - began_s)
    return sorted(taken)[reads // 2]
