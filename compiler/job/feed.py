"""The batches that a job is given: whole global batches, or on a rank of torchrun only the rows of its lane.

The first dimension tells the two kinds apart: with several lanes a part is shorter than the whole. A run keeps to the
kind that it began with, so that a last batch that is too short is not taken for a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ...ir.errors import BatchError, PlanError
from ...ir.program import Interface, place_of
from .batch import BatchShape
from .sampler import RankSampler, lane_rows

WHOLE, PART = "the whole batch", "a part of the batch"
SAMPLER = "sampler"  # its key in a checkpoint's data


class Feed:
    """The batches of one process. `device`: the device that a rank of torchrun runs; None for a process that hands over
    whole batches for all devices."""

    def __init__(self, model: nn.Module, shape: BatchShape, interface: Interface, device: int | None):
        self.model, self.shape, self.interface, self.device = model, shape, interface, device
        self.lanes = max(1, len(interface.lanes))
        self.part_size = shape.size // self.lanes
        self.sampler: RankSampler | None = None
        self._kinds: dict[str, str] = {}  # function of the job -> kind of its batches
        self._resumed: Mapping[str, Any] | None = None  # the state of a sampler that is yet to be made

    @cached_property
    def rows(self) -> range:
        """The rows of a global batch that are needed here."""
        if self.device is None or self.lanes == 1:
            return range(self.shape.size)
        if self.device >= self.interface.world_size:
            raise PlanError(f"this is rank {self.device}, the plan has {self.interface.world_size} devices")
        return lane_rows(self.shape.size, self.lanes, place_of(self.interface, self.device)[0])

    # --- batches

    def read(self, function: str, batch: Any, needed: Collection[str]) -> tuple[dict[str, Tensor], str]:
        """The batch's tensors by name, and its kind; "" where nothing is needed and nothing was given.

        Raises `BatchError` for another batch than was compiled, or another kind than before.
        """
        if batch is None and self.device is not None and not needed:
            return {}, ""
        if batch is None:
            raise BatchError(
                f"batch is None, but {', '.join(needed or self.shape.leaves)} are loaded here; only ranks that load "
                "nothing may go without"
            )
        if self.device is None:
            leaves = self.shape.check(self.model, batch)
        else:
            leaves = self.shape.check(self.model, batch, part_size=self.part_size, needed=needed)
        if not leaves:
            return {}, ""
        name, value = next(iter(leaves.items()))
        size = len(value) * self.shape.size // self.shape.entries(name, self.shape.size)
        kind = WHOLE if size == self.shape.size else PART
        before = self._kinds.get(function, kind)
        if kind != before:
            raise BatchError(
                f"batch has {size} rows, {kind}, and until now it was {before}: a last batch that is too short is to "
                f"be dropped or filled up to {self.shape.size if before == WHOLE else self.part_size} rows"
            )
        return leaves, kind

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

    def trained(self) -> None:
        """Count the batch of a finished step."""
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
