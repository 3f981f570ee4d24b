"""The file of one stage on SSD: its optimizer states and fp32 masters, and maybe its weights.

The file holds [weights] [masters, states], each part beginning at a page; fp32 weights are the masters. A buffer in
DRAM with the same layout is what a program's value "stage1.states" or "stage1.all" stands for. An update reads and
writes the pages that hold anything trained; what is frozen is written when it is loaded, and not again. If an update
may be undone, the file has two slots: the new contents go to the other slot, and count from the end of the step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import PlanError
from ...ir.program import PAGE, Interface, StageHome, StageSpec, aligned
from ..optimizer.spec import OptimizerSpec
from ..ssd.extents import FileRange
from ..ssd.file import SsdFile
from ..ssd.folder import SsdFolder
from ..state.tensor_file import StoredTensor
from .arena import BufferLayout, masters_layout


@dataclass
class Staged:
    """A stage's buffer in DRAM. `weights` and `masters` are empty if they live elsewhere."""

    flat: Tensor
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


class SsdTensor(StoredTensor):
    """A tensor in a stage's file, read in pieces into `buffer`, which begins at a page and is whole pages long."""

    def __init__(self, file: SsdFile, offset_bytes: int, like: Tensor, buffer: Tensor):
        self.file, self.offset_bytes, self.buffer = file, offset_bytes, buffer
        self.dtype, self.shape, self.nbytes = like.dtype, tuple(like.shape), like.nbytes

    def chunks(self) -> Iterator[memoryview]:
        done = 0
        while done < self.nbytes:
            begin = self.offset_bytes + done
            first = begin // PAGE * PAGE
            length = min(aligned(self.offset_bytes + self.nbytes - first, PAGE), len(self.buffer))
            self.file.read(first, self.buffer[:length])
            inside = self.buffer[begin - first : min(length, begin - first + self.nbytes - done)]
            yield inside.numpy().data
            done += len(inside)


class StageFile:
    """The file of one stage, or of a shard of it, whose weights are laid out by `layout`. `in_files`: where the user's
    files have the bytes of frozen weights. Raises `DoesNotFit` if the disks lack the room."""

    def __init__(
        self,
        spec: StageSpec,
        layout: BufferLayout,
        interface: Interface,
        home: StageHome,
        optimizer: OptimizerSpec | None,
        folder: SsdFolder,
        in_files: Mapping[str, FileRange],
    ):
        self.spec, self.layout, self.master, self.optimizer = spec, layout, interface.master, optimizer
        counted = interface.part_of(spec.name, home.group)  # shards are counted alike, whatever they have of parameters
        self.stepped_full = interface.master or interface.rounds
        self.masters_say_all = interface.masters_say_all(spec)
        self.has_weights = home.weights == ops.SSD
        self.has_states = home.states == ops.SSD
        self.weights_bytes = aligned(counted.weight_bytes, PAGE) if self.has_weights else 0
        self.num_bytes = self.weights_bytes + (interface.states_bytes(counted) if self.has_states else 0)
        # Pages that an update reads and writes; without weights here all are states.
        is_whole = not (self.has_weights and self.has_states)
        self.ranges = ((0, self.num_bytes),) if is_whole else interface.update_ranges(counted, home.group)
        slots = 2 if home.undo else 1
        ranges = (
            (slot * self.num_bytes + place.offset_bytes, in_files[place.name])
            for slot in range(slots)
            for place in (layout.places if self.has_weights else ())
            if place.name in in_files
        )
        self.file = folder.reserve(spec.name, self.num_bytes * slots, ranges)
        self.slot = 0
        self.new_slot = 1 if home.undo else 0
        self.written = False  # whether the new slot holds this step's contents
        self.waited_s = 0.0  # how long a write has waited for a save in the background to read what it replaces
        self._waits_since_s: float | None = None
        self._held: dict[int, threading.Event] = {}  # by slot: set when a save in the background has read it
        self._known: dict[int, Staged] = {}  # by address: a program's buffer of a stage is always at the same place

    def views(self, flat: Tensor) -> Staged:
        """The tensors inside a buffer of at least `num_bytes`."""
        if flat.data_ptr() not in self._known:
            self._known = {flat.data_ptr(): self._views(flat)}
        return self._known[flat.data_ptr()]

    def _views(self, flat: Tensor) -> Staged:
        weights = self.layout.views(flat) if self.has_weights else {}
        trained = {param.name for param in self.spec.params if param.requires_grad}
        masters: dict[str, Tensor] = {}
        offset = self.weights_bytes
        if self.has_states and self.master:
            layout: BufferLayout = masters_layout(self.spec)
            masters, offset = layout.views(flat, offset), offset + layout.total_bytes
        elif self.has_weights:
            masters = {name: weight for name, weight in weights.items() if name in trained}
        return Staged(flat, weights, masters, self._states(flat, offset) if self.has_states else {})

    def _states(self, flat: Tensor, offset: int) -> dict[str, dict[str, Tensor]]:
        assert self.optimizer is not None
        found: dict[str, dict[str, Tensor]] = {}
        for param in self.spec.params:
            if not param.requires_grad:
                continue
            found[param.name] = {}
            kind = torch.float32 if self.stepped_full else getattr(torch, param.dtype)
            row = self.optimizer.state_shapes(param.shape, param.name, kind)
            alignment = 64 if len(row) <= 3 else 16  # what `STATE_ROOM` has room for
            for key, (shape, dtype) in row.items():
                num_bytes = math.prod(shape) * dtype.itemsize
                found[param.name][key] = flat[offset : offset + num_bytes].view(dtype).view(shape)
                offset += aligned(num_bytes, alignment)
        if offset > self.num_bytes:
            raise PlanError(
                f"{self.spec.name}: the states of {self.optimizer.path} need {offset - self.num_bytes} bytes more on "
                "SSD than planned; compile the plan again"
            )
        return found

    def read_weights(self, into: Tensor) -> None:
        """Read the weights into a buffer of at least `weights_bytes`."""
        self.file.read(self.slot * self.num_bytes, into[: self.weights_bytes])

    def read(self, into: Tensor) -> None:
        """Read what an update needs as the last step left it, without the weights if these follow from the masters."""
        start = self.weights_bytes if self.masters_say_all and self.has_states else 0
        for begin, end in self.ranges:
            begin = max(begin, start)
            self.file.read(self.slot * self.num_bytes + begin, into[begin:end])

    def read_all(self, into: Tensor) -> None:
        """Read all `num_bytes`."""
        self.file.read(self.slot * self.num_bytes, into[: self.num_bytes])

    def tensors_on_ssd(self, buffer: Tensor) -> dict[str, dict[str, Any]]:
        """The content of the file, as `SsdTensor`s that read into `buffer`: "weights", "masters", and "states" by
        parameter."""
        start, flat = self.slot * self.num_bytes, torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")
        staged = self._views(flat)

        def place(tensor: Tensor) -> SsdTensor:
            return SsdTensor(self.file, start + int(tensor.storage_offset()) * tensor.dtype.itemsize, tensor, buffer)

        return {
            "weights": {name: place(tensor) for name, tensor in staged.weights.items()},
            "masters": {name: place(tensor) for name, tensor in staged.masters.items()},
            "states": {name: {key: place(t) for key, t in row.items()} for name, row in staged.states.items()},
        }

    def hold(self) -> None:
        """Let what the file holds now stay until `release`; a step that would write over it waits. Between steps."""
        self._held = {self.slot: threading.Event()}
        self.waited_s, self._waits_since_s = 0.0, None

    def release(self) -> None:
        """Let writes go on. Any thread may call it."""
        if self._waits_since_s is not None:
            self.waited_s = max(self.waited_s, time.perf_counter() - self._waits_since_s)
        for event in self._held.values():
            event.set()

    def _await_reader(self, slot: int) -> None:
        event = self._held.get(slot)
        if event is not None and not event.is_set():
            self._waits_since_s = time.perf_counter()
            event.wait()
            self._waits_since_s = None

    def write(self, flat: Tensor) -> None:
        """Write what an update has changed, which counts after `commit` if there are two slots."""
        self._await_reader(self.new_slot)
        for begin, end in self.ranges:
            self.file.write(self.new_slot * self.num_bytes + begin, flat[begin:end])
        self.written = True

    def write_all(self, flat: Tensor) -> None:
        """Write new contents to every slot."""
        for slot in {self.slot, self.new_slot}:
            self._await_reader(slot)
            self.file.write(slot * self.num_bytes, flat[: self.num_bytes])
        self.written = False

    def commit(self) -> None:
        """End a step: from here on, reads give what the step wrote."""
        if self.written and self.new_slot != self.slot:
            self.slot, self.new_slot = self.new_slot, self.slot
        self.written = False

    def discard(self) -> None:
        """Drop what this step wrote."""
        assert self.new_slot != self.slot, "there is nothing to go back to"
        self.written = False

    def fill(self, flat: Tensor, weights: Mapping[str, Tensor], keep_states: bool) -> None:
        """Fill a buffer with these weights, and with states of zeros unless the buffer's own are kept."""
        if not keep_states:
            flat[: self.num_bytes].zero_()
        staged = self.views(flat)
        for name in {**staged.weights, **staged.masters}:
            value = weights[name]
            for own in (staged.weights, staged.masters):
                if name in own:
                    own[name].copy_(value)


def staging_bytes(interface: Interface, homes: Mapping[str, StageHome]) -> int:
    """The bytes of the largest stage's file: what loading and saving need of DRAM, one stage at a time."""
    largest = 0
    for stage, home in homes.items():
        spec = interface.part_of(stage, home.group)
        num_bytes = aligned(spec.weight_bytes, PAGE) if home.weights == ops.SSD else 0
        largest = max(largest, num_bytes + (interface.states_bytes(spec) if home.states == ops.SSD else 0))
    return largest
