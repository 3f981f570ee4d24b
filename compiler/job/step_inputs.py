"""What the devices load in a step: the batch's tensors, and the inputs that no batch of the user has.

In: a batch, or on a rank of torchrun a part of one. Out: tensors by the names of the programs' inputs. What the loss
divides by is counted over the whole batch first, by all ranks together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...ir.errors import BatchError
from ...ir.program import place_of
from ...runtime.processes.driver import Driver
from ...runtime.state.weights import WeightSource, stage_buffers
from ..folder import Folder
from .counts import BatchCounts, Counts, counts_spec, of_all_lanes, rows_of
from .feed import PART, WHOLE, Feed
from .state import whole_state


class StepInputs:
    """`make_counter` is called with the first batch that is counted."""

    def __init__(self, feed: Feed, folder: Folder, make_counter: Callable[[], BatchCounts]):
        self.feed, self.interface, self.rules = feed, folder.interface, folder.settings.counts
        self.make_counter = make_counter
        self._counter: BatchCounts | None = None

    def of(self, function: str, batch: Any, call: str, driver: Driver | None) -> dict[str, Tensor]:
        """The inputs of a step. `driver`: where each rank hands over a batch; then all ranks raise if one batch is
        wrong, or if their calls differ."""
        if driver is None:
            leaves, kind = self.feed.read(function, batch, ())
            return self._loaded(leaves) | self._divisors(function, [self._counted(batch, leaves, kind)], kind)
        refused = None
        self.counter()  # all ranks, whether or not their batches are accepted: it may ask the others
        leaves, counts = {}, None
        kind = ""
        try:
            leaves, kind = self.feed.read(function, batch, self.needed(driver.inputs.get(function, ())))
            counts = self._counted(batch, leaves, kind)
        except BatchError as error:
            refused = error
        rows = driver.agree_on_batch(call, kind, refused, counts)
        self.feed.keep_to(function, kind)
        return self._loaded(leaves) | self._divisors(function, rows, kind)

    def needed(self, loaded: Collection[str]) -> list[str]:
        """The inputs of the user's batch that a process needs whose devices load these: what counts is no input, but
        needs some to be counted."""
        own = set(loaded).difference(self.rules.names)
        if own == set(loaded):
            return sorted(own)
        return sorted(own.union(self.rules.inputs) or self.feed.shape.leaves)

    def counter(self) -> BatchCounts:
        if self._counter is None:
            self._counter = self.make_counter()
        return self._counter

    def forget(self) -> None:
        """Make the counter anew for the next batch: the devices may have other buffers."""
        self._counter = None

    def _loaded(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs that a stage loads: of others at most the counts matter."""
        return {name: value for name, value in leaves.items() if name in self.interface.batch}

    def _counted(self, batch: Any, leaves: Mapping[str, Tensor], kind: str) -> Counts | None:
        """What the rows that are here count, on a rank of torchrun those of its lane; None without what is counted."""
        feed = self.feed
        if not self.rules.divisors or not kind or not leaves.keys() >= set(self.rules.inputs):
            return None
        if len(feed.rows) < feed.shape.size and kind == WHOLE:
            batch, leaves = rows_of((batch, leaves), feed.rows, feed.shape.size)
        each = self.interface.total_micro_batches * len(feed.rows) // feed.shape.size
        return self.counter().of(batch, leaves, each)

    def _divisors(self, function: str, rows: Sequence[Counts | None], kind: str) -> dict[str, Tensor]:
        """The inputs that no batch of the user has, as many as belong to this kind of batch. `rows`: what every process
        has counted."""
        if not self.rules.divisors:
            return {}
        counts = rows[0] if self.feed.device is None else of_all_lanes(rows, self.interface)
        assert counts is not None
        each_own = self.interface.asynchronous and function == "step"
        found = self.counter().inputs(counts, each_own=each_own)
        if kind != PART:
            return found
        assert self.feed.device is not None
        first = place_of(self.interface, self.feed.device)[0] * self.interface.micro_batches
        return {name: value[first : first + self.interface.micro_batches] for name, value in found.items()}


def counted_buffers(folder: Folder, driver: Driver, find_source: Callable[[], WeightSource]) -> dict[str, Tensor]:
    """The buffers that counting reads (class weights): the programs' constants, those that a stage holds, else the
    model's own."""
    spec = counts_spec(folder.settings.counts)
    names = {buffer.name for buffer in spec.buffers}
    found = {name: tensor for name, tensor in folder.constants.items() if name in names}
    for stage in folder.interface.stages.values():
        if not found.keys() >= {buffer.name for buffer in stage.model_buffers} & names:
            found |= whole_state(driver, stage, with_optimizer=False).buffers
    rest = tuple(buffer for buffer in spec.buffers if buffer.name not in found)
    if rest:
        found |= stage_buffers(find_source(), dataclasses.replace(spec, buffers=rest))
    return found
