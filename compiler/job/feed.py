"""The batches that a job is given: whole global batches, or on a rank of torchrun only the rows of its lane.

The first dimension tells the two kinds apart: with several lanes a part is shorter than the whole. A run keeps to the
kind that it began with, so that a last batch that is too short is not taken for a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import BatchError, PlanError
from ...ir.program import Interface, place_of
from ..batches.shape import BatchShape, program_inputs, rows_of_leaves
from ..capture.prologue.prologue import Prologue
from ..folder import Folder
from .any_size import AnySizes, MicroBatch, is_listed, join
from .sampler import RankSampler, lane_rows

WHOLE, PART = "the whole batch", "a part of the batch"
SAMPLER = "sampler"  # its key in a checkpoint's data


class Feed:
    """The batches of one process. `device`: the device that a rank of torchrun runs; None for a process that hands over
    whole batches for all devices. `any_sizes`: where sizes differ from step to step; `shape` is then the largest.
    `prologue`: makes inputs of a batch that it does not have."""

    def __init__(
        self,
        model: nn.Module,
        shape: BatchShape,
        interface: Interface,
        device: int | None,
        any_sizes: AnySizes | None = None,
        prologue: Prologue | None = None,
    ):
        self.any_sizes, self.prologue = any_sizes, prologue
        self.model, self.shape, self.interface, self.device = model, shape, interface, device
        self.teams = interface.teams
        self.sampler: RankSampler | None = None
        self._kinds: dict[str, str] = {}  # function of the job -> kind of its batches
        self._resumed: Mapping[str, Any] | None = None  # the state of a sampler that is yet to be made

    @staticmethod
    def for_folder(
        model: nn.Module, folder: Folder, device: int | None, prologue: Prologue | None = None
    ) -> Feed:
        """The feed of a job with these files."""
        settings, interface = folder.settings, folder.interface
        leaves = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in settings.batch}
        shape = BatchShape(leaves, rows_of_leaves(leaves), settings.flags)
        if settings.sizes is None:
            return Feed(model, shape, interface, device, prologue=prologue)
        alike = [term for term in settings.loss if term.kind not in ("counted", "weighted")]
        uneven = f"the loss of {alike[0].source or 'the model'} is a mean to which each adds alike" if alike else ""
        sizes = AnySizes(model, shape, settings.sizes, interface.total_micro_batches, uneven)
        return Feed(model, shape, interface, device, sizes)

    @cached_property
    def rows(self) -> range:
        """The rows of a global batch that are needed here."""
        if self.device is None or self.teams == 1:
            return range(self.shape.size)
        if self.device >= self.interface.world_size:
            raise PlanError(f"this is rank {self.device}, the plan has {self.interface.world_size} devices")
        return lane_rows(self.shape.size, self.interface, place_of(self.interface, self.device)[0])

    @property
    def part_size(self) -> int:
        """The number of rows of a part of a batch: those of this process's lane."""
        return len(self.rows)

    @property
    def micro_batches(self) -> range:
        """The micro-batches of a global batch that are needed here."""
        interface = self.interface
        if self.device is None or self.teams == 1:
            return range(interface.total_micro_batches)
        lane, _ = place_of(interface, self.device)
        first = interface.first_micro_batch(lane)
        return range(first, first + interface.micro_batches_of(lane))

    # --- batches

    def read(self, function: str, batch: Any, needed: Collection[str]) -> tuple[dict[str, Tensor], str]:
        """The batch's tensors by name, and its kind; "" where nothing is needed and nothing was given.

        Raises `BatchError` for another batch than was compiled, or another kind than before.
        """
        if self.is_absent(batch, needed):
            return {}, ""
        listed = batch if is_listed(batch, self.shape) else ()
        batch = join(listed) if listed else batch
        shape, made = self.shape, [] if self.prologue is None else self.prologue.names
        if self.prologue is not None:
            shape = replace(shape, leaves={name: leaf for name, leaf in shape.leaves.items() if name not in made})
            needed = shape.leaves
        if self.device is None:
            leaves = shape.check(self.model, batch)
        else:
            leaves = shape.check(self.model, batch, part_size=self.part_size, needed=needed)
        if not leaves:
            return {}, ""
        leaves = program_inputs(leaves)
        name, value = next(iter(leaves.items()))
        size = len(value) * self.shape.size // self.shape.entries(name, self.shape.size)
        kind = WHOLE if size == self.shape.size else PART
        self._require_kind(function, kind, size)
        if self.prologue is not None:
            total = self.interface.total_micro_batches
            with_made = self.prologue.add(batch, size * total // self.shape.size, total, listed)
            leaves |= {name: with_made[name] for name in made}
        return leaves, kind

    def cut(self, function: str, batch: Any, needed: Collection[str]) -> tuple[list[MicroBatch], str]:
        """As `read`, for a batch whose sizes may differ from step to step: its micro-batches, and its kind."""
        assert self.any_sizes is not None
        if self.is_absent(batch, needed):
            return [], ""
        needed = self.shape.leaves if self.device is None else needed
        of_lane, rows = len(self.micro_batches), self.any_sizes.rows(batch, needed)
        is_part = rows <= self.part_size if self.any_sizes.sizes.rows else rows == self.part_size
        if is_listed(batch, self.shape):
            is_part = len(batch) == of_lane
        kind = PART if self.device is not None and self.teams > 1 and is_part else WHOLE
        if self.any_sizes.sizes.rows:  # a whole batch that is short looks like a part
            kind = self._kinds.get(function, kind)
        self._require_kind(function, kind, rows)
        return self.any_sizes.cut(batch, of_lane if kind == PART else self.interface.total_micro_batches, needed), kind

    def is_absent(self, batch: Any, needed: Collection[str]) -> bool:
        """Whether there is no batch, and none is needed. Raises `BatchError` where one is."""
        if batch is None and (self.device is None or needed):
            raise BatchError(
                f"batch is None, but {', '.join(needed or self.shape.leaves)} are loaded here; only ranks that load "
                "nothing may go without"
            )
        return batch is None

    def _require_kind(self, function: str, kind: str, size: int) -> None:
        before = self._kinds.get(function, kind)
        if kind != before:
            raise BatchError(
                f"batch has {size} rows, {kind}, and until now it was {before}: a last batch that is too short is to "
                f"be dropped or filled up to {self.shape.size if before == WHOLE else self.part_size} rows"
            )

    def keep_to(self, function: str, kind: str) -> None:
        """Require that all later batches of a function are of this kind."""
        if kind:
            self._kinds[function] = kind

    def forget(self) -> None:
        """Let a new run begin with either kind."""
        self._kinds.clear()

    # --- the position in the data

    def sample(self, dataset: Sized, shuffle: bool, seed: int, last: str, start: int | None) -> RankSampler:
        """A sampler of this process's rows that counts trained batches; see `Job.sampler`."""
        if not hasattr(dataset, "__len__"):
            raise PlanError(
                f"the data set is a {type(dataset).__name__}, which has no length; a sampler reads data sets that have "
                "one (map-style). Of an iterable one every rank reads all, and hands over whole batches"
            )
        sampler = RankSampler(len(dataset), self.shape.size, rows=self.rows, shuffle=shuffle, seed=seed, last=last)
        if start is not None and start < 0:
            raise PlanError(f"start={start}; it is a number of samples, 0 or more")
        if start is not None:
            sampler.load_state_dict(sampler.state_at(start, 0))
        elif self._resumed is not None:
            sampler.load_state_dict(self._resumed)
        sampler.counts_steps = True
        self.sampler = sampler
        return sampler

    def advance(self) -> None:
        """Count the batch of a step that has ended, or has left the batch out."""
        self._resumed = None  # a sampler made after this reads other data
        if self.sampler is not None:
            self.sampler.advance()

    def state(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a checkpoint, with the sampler's position."""
        return dict(data) if self.sampler is None else {SAMPLER: self.sampler.state_dict(), **data}

    def load(self, data: Mapping[str, Any]) -> None:
        """Go on at the sampler's position in a checkpoint's data."""
        self._resumed = data.get(SAMPLER)
        if self.sampler is not None and self._resumed is not None:
            self.sampler.load_state_dict(self._resumed)
