"""Memory that is taken once and reused: the arena for fetched weights, and flat buffers with a place for each tensor.

A stage's weights are one flat buffer, so that a fetch is one copy. Host buffers that a CUDA device copies from or to
are pinned.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ir.program import PAGE, ParamSpec, StageSpec, aligned
from ..accelerator import lock_pages
from ..nodes import HUGE_PAGE_BYTES, NODES, map_pages

T = TypeVar("T")
Pieces = tuple[tuple[int, int, int], ...]  # offset in the arena, first and last + 1 of the parameters there


@dataclass(frozen=True)
class Place:
    """One tensor inside a flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class BufferLayout:
    """The place of each tensor in a flat buffer."""

    places: tuple[Place, ...]
    total_bytes: int

    @staticmethod
    def from_params(
        params: Iterable[ParamSpec], dtype: torch.dtype | None = None, alignment: int = 512
    ) -> BufferLayout:
        """In order, each start aligned; `dtype` replaces the dtypes of the parameters."""
        places, offset = [], 0
        for param in params:
            own = getattr(torch, param.dtype) if dtype is None else dtype
            size = param.numel * own.itemsize
            places.append(Place(param.name, param.shape, own, offset, size))
            offset += aligned(size, alignment)
        return BufferLayout(tuple(places), offset)

    def start_of(self, index: int) -> int:
        """The offset of the tensor number `index`; for the number after the last one, the end."""
        return self.places[index].offset_bytes if index < len(self.places) else self.total_bytes

    def part(self, first: int, last: int) -> BufferLayout:
        """The tensors `first` to `last` - 1, where they are."""
        return BufferLayout(self.places[first:last], self.total_bytes)

    def views(self, flat: Tensor, start_bytes: int = 0) -> dict[str, Tensor]:
        """The tensors inside `flat` (uint8), beginning at `start_bytes`."""
        found = {}
        for place in self.places:
            start = start_bytes + place.offset_bytes
            found[place.name] = flat[start : start + place.size_bytes].view(place.dtype).view(place.shape)
        return found


def weights_layout(spec: StageSpec) -> BufferLayout:
    """All parameters that a fetch brings, in the dtype of the computation; as long as `spec.weight_bytes`."""
    return BufferLayout.from_params(spec.moving)


def grads_layout(spec: StageSpec) -> BufferLayout:
    """The gradients of the trained parameters, without gaps: `spec.grad_bytes` long. The widest come first, so that
    each begins at a whole number of its elements."""
    trained = [replace(p, dtype=p.grad_dtype) for p in spec.params if p.requires_grad]
    return BufferLayout.from_params(sorted(trained, key=lambda p: -getattr(torch, p.dtype).itemsize), alignment=1)


def masters_layout(spec: StageSpec) -> BufferLayout:
    """The trained parameters in fp32, packed."""
    return BufferLayout.from_params((p for p in spec.params if p.requires_grad), torch.float32, alignment=64)


def pages(num_bytes: int, pinned: bool = False, node: int | None = None) -> Tensor:
    """A flat buffer of zeros on the host that begins and ends at a page, as disks need it. `node`: see `nodes`."""
    num_bytes = aligned(num_bytes, PAGE)
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return locked_memory(num_bytes, node) if pinned else _put_on_node(map_pages(num_bytes), node)


def allocate(num_bytes: int, device: torch.device, pinned: bool = False, node: int | None = None) -> Tensor:
    """An uninitialised flat buffer; `pinned` asks for page-locked host memory, `node` for that of a node."""
    if pinned and num_bytes:
        return locked_memory(num_bytes, node)
    if device.type == "cpu" and num_bytes >= HUGE_PAGE_BYTES:
        return _put_on_node(map_pages(num_bytes), node)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _put_on_node(pages: mmap.mmap, node: int | None) -> Tensor:
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    NODES.place(flat.data_ptr(), flat.numel(), node)
    return flat


def locked_memory(num_bytes: int, node: int | None = None) -> Tensor:
    """Host memory that a GPU copies from and to by itself, unlocked when the last tensor in it is gone.

    torch's own pinned allocator rounds up to the next power of two, which no account of DRAM would see. All threads
    take the pages, each a piece, before they are locked; the driver would take them with one. They are locked as one
    range: a copy must be in memory of one registration.
    """
    pages = map_pages(num_bytes)  # whole pages, shared with no other buffer
    pages.madvise(mmap.MADV_DONTFORK)  # a child must not make the next write here move to another page
    flat = _put_on_node(pages, node)
    flat.zero_()
    lock = weakref.finalize(flat.untyped_storage(), _unlock, lock_pages(flat.data_ptr(), num_bytes), pages)
    lock.atexit = False  # the driver unlocks what a process leaves, once nothing uses it
    return flat


def _unlock(unlock: Callable[[], object], pages: mmap.mmap) -> None:
    """`pages` is an argument so that the pages are still mapped here."""
    unlock()


class Arena:
    """One preallocated block of a memory in which values have planned places: fetched weights on a device, read and
    offloaded values in DRAM (`on_pages`, and pinned, on the GPU's `node`, if a GPU copies from it).

    A place is written again only after the events of all readers of its old value: the op that takes the place waits
    for them (`ir/program/order.py`).
    """

    def __init__(self, device: torch.device, on_pages: bool = False, pinned: bool = False, node: int | None = None):
        self.device, self.on_pages, self.pinned, self.node = device, on_pages, pinned, node
        self.flat = allocate(0, device)
        self._views: dict[tuple[str, Pieces], dict[str, Tensor]] = {}
        self._prepared: dict[Hashable, Any] = {}

    @property
    def bytes(self) -> int:
        return self.flat.numel()

    def ensure(self, num_bytes: int) -> None:
        """Make the arena at least this large; only between steps, when it holds nothing."""
        if num_bytes > self.bytes:
            self._views.clear()
            self._prepared.clear()
            self.flat = allocate(0, self.device)  # give back the old block before the new one is taken
            on_pages = self.on_pages and self.device.type == "cpu"
            self.flat = pages(num_bytes, self.pinned, self.node) if on_pages else allocate(num_bytes, self.device)

    def forget(self) -> None:
        """Make the views anew, of ops that are planned anew."""
        self._prepared.clear()

    def range(self, offset_bytes: int, num_bytes: int) -> Tensor:
        return self.flat[offset_bytes : offset_bytes + num_bytes]

    def pages_of(self, tensor: Tensor, num_bytes: int) -> tuple[int, Tensor]:
        """The offset and the bytes of the whole pages of a value at the beginning of its place."""
        offset = tensor.data_ptr() - self.flat.data_ptr()
        assert 0 <= offset < self.bytes and offset % PAGE == 0, "no value of this arena"
        return offset, self.range(offset, aligned(num_bytes, PAGE))

    def views(self, name: str, layout: BufferLayout, pieces: Pieces) -> dict[str, Tensor]:
        """The tensors of a stage at these places: always the same dict for the same places."""
        key = (name, pieces)
        if key not in self._views:
            found: dict[str, Tensor] = {}
            for offset_bytes, first, last in pieces:
                part = layout.part(first, last)
                found |= part.views(self.flat, offset_bytes - layout.start_of(first))
            self._views[key] = found
        return self._views[key]

    def once(self, key: Hashable, prepare: Callable[[], T]) -> T:
        """The result of `prepare`, which is called once per key and makes it of views of this arena."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        found: T = self._prepared[key]
        return found
