"""The lower bound of a step that swaps to disk: computation, optimizer and disk, each measured alone."""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.bench.peers.eager import Eager
from penstock.runtime.ssd.folder import SsdFolder

PIECE_BYTES = 16 << 20


class EagerParts(Eager):
    """Eager training with everything in RAM, with the seconds of computation and of the optimizer in each step."""

    def __init__(self, model: nn.Module, micro_batches: int, lr: float):
        super().__init__(model, micro_batches, lr)
        self.compute_s: list[float] = []
        self.optimizer_s: list[float] = []

    def step(self, batch: Mapping[str, Tensor]) -> float:
        begin_s = time.perf_counter()
        loss = self.gradients(batch)
        computed_s = time.perf_counter()
        self.optimizer.step()
        self.compute_s.append(computed_s - begin_s)
        self.optimizer_s.append(time.perf_counter() - computed_s)
        return loss


class Disk:
    """Moves the bytes of a step, through the runtime's own files in `directory`, and does nothing else.

    A step may move many times the bytes of a file; then the file is read or written again, past the page cache. Reads
    and writes use different memory, so that both may be under way at once.
    """

    def __init__(self, directory: str | Path, read_bytes: int, write_bytes: int, file_bytes: int = 512 << 20):
        self.read_bytes, self.write_bytes = read_bytes, write_bytes
        self.folder = SsdFolder([directory], "bench")
        self.files = [self.folder.reserve(name, file_bytes) for name in ("read", "written")]
        self.read_s: list[float] = []
        self.write_s: list[float] = []
        self.memory = [torch.frombuffer(mmap.mmap(-1, PIECE_BYTES), dtype=torch.uint8) for _ in self.files]
        for memory in self.memory:
            memory.random_()  # some disks compress
        for file in self.files:
            for offset in range(0, file.num_bytes, PIECE_BYTES):
                file.write(offset, self.memory[0][: file.num_bytes - offset])

    def read(self) -> None:
        for offset, length in self._pieces(self.read_bytes):
            self.files[0].read(offset, self.memory[0][:length])

    def write(self) -> None:
        for offset, length in self._pieces(self.write_bytes):
            self.files[1].write(offset, self.memory[1][:length])

    def read_then_write(self) -> None:
        """Do all reads, then all writes, and append the seconds of each to `read_s` and `write_s`."""
        begin_s = time.perf_counter()
        self.read()
        between_s = time.perf_counter()
        self.write()
        self.read_s.append(between_s - begin_s)
        self.write_s.append(time.perf_counter() - between_s)

    def read_while_writing(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(self.read), pool.submit(self.write)]:
                future.result()

    def _pieces(self, total_bytes: int) -> list[tuple[int, int]]:
        """(offset, length) of each transfer, in whole pages, starting again at the end of the file."""
        pieces, file_bytes = [], self.files[0].num_bytes // PIECE_BYTES * PIECE_BYTES
        for done in range(0, total_bytes, PIECE_BYTES):
            pages = -(-min(PIECE_BYTES, total_bytes - done) // 4096)
            pieces.append((done % file_bytes, pages * 4096))
        return pieces

    def close(self) -> None:
        self.folder.close()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Bound:
    """Seconds of the parts of one step. `cores_shared`: computation leaves no core free for the optimizer."""

    compute_s: float
    optimizer_s: float
    disk_s: float
    cores_shared: bool
    parts: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.cores_shared:
            parts = {"compute and optimizer": self.compute_s + self.optimizer_s, "disk": self.disk_s}
        else:
            parts = {"compute": self.compute_s, "optimizer": self.optimizer_s, "disk": self.disk_s}
        object.__setattr__(self, "parts", parts)

    @property
    def seconds(self) -> float:
        """The longest of the parts that can run at the same time."""
        return max(self.parts.values())

    @property
    def longest_part(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])
