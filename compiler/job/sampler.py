"""The samples of a data set that a rank loads: its rows of every global batch, in an order that a seed fixes.

A position counts samples in the order in which one process alone would read them, epoch after epoch. It means the same
on every rank, for any number of ranks and any batch, so a run goes on at the right sample wherever it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from ...ir.errors import CheckpointError, PlanError
from ...ir.program import Interface

LASTS = ("carry", "drop", "pad")


class SampleOrder:
    """The order of samples: each comes once an epoch. With `shuffle` every epoch has an order of its own."""

    def __init__(self, num_samples: int, shuffle: bool, seed: int):
        self.num_samples, self.shuffle, self.seed = num_samples, shuffle, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def take(self, position: int, count: int) -> list[int]:
        """The indices of `count` samples from `position` on."""
        found: list[int] = []
        while count > 0:
            epoch, first = divmod(position, self.num_samples)
            here = min(count, self.num_samples - first)
            found += self._order_of(epoch)[first : first + here].tolist()
            position, count = position + here, count - here
        return found

    def _order_of(self, epoch: int) -> torch.Tensor:
        """The order of an epoch; the last one asked for is kept."""
        if epoch != self._epoch:
            made = torch.Generator().manual_seed(self.seed + 1 + epoch)
            count = self.num_samples
            self._order = torch.randperm(count, generator=made) if self.shuffle else torch.arange(count)
            self._epoch = epoch
        return self._order


class RankSampler(Sampler[list[int]]):
    """The rows `rows` of every global batch of `batch` samples: a `batch_sampler` for a `DataLoader`.

    One pass reads the rest of an epoch. `last` says what becomes of samples at its end that are fewer than a batch:
    "carry" fills the batch with the first samples of the next epoch, which are left out there, so each sample comes
    once an epoch; "drop" leaves them out; "pad" fills the batch with the epoch's first samples, which come twice.

    A pass begins after the samples that were handed out before, or, where a `Job` counts its steps here (see
    `Job.sampler`), after those that were trained. After an epoch was read to its end a pass begins with the next epoch,
    as loaders read ahead of training. torchdata's `StatefulDataLoader` saves and restores a pass itself.

    Raises `PlanError` for an empty data set, rows outside the batch, or a drop that leaves no batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch: int,
        *,
        rows: range | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "carry",
    ):
        rows = range(batch) if rows is None else rows
        if last not in LASTS:
            raise PlanError(f"last={last!r}; allowed are {', '.join(LASTS)}")
        if num_samples < 1:
            raise PlanError("the data set is empty; a sampler needs one sample or more")
        if last == "drop" and num_samples < batch:
            raise PlanError(
                f"last='drop' leaves nothing: the data set has {num_samples} samples, fewer than one batch of {batch}; "
                f"allowed: last='carry', last='pad', or a batch of {num_samples} or less"
            )
        if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch:
            raise PlanError(f"rows={rows}; allowed are rows in one piece between 0 and {batch}, the batch")
        self.num_samples, self.batch, self.rows, self.last = num_samples, batch, rows, last
        self.order = SampleOrder(num_samples, shuffle, seed)
        self.counts_steps = False  # whether a job counts trained batches; if not, a pass counts those it hands out
        self._position = 0
        self._begin = 0  # the end of the last pass that was read to its end, though perhaps not yet trained

    @property
    def position(self) -> int:
        """The number of samples of all ranks before the next step, or pass."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next pass reads."""
        return max(self._position, self._begin) // self.num_samples

    def advance(self) -> None:
        """Count one global batch."""
        self._position = self.next_position(self._position)

    def next_position(self, position: int) -> int:
        """The position after the batch at `position`, where the next batch begins."""
        end = (position // self.num_samples + 1) * self.num_samples
        after = position + self.batch
        return self._begin_of_batch(min(after, end) if self.last == "pad" else after)

    def _begin_of_batch(self, position: int) -> int:
        """The begin of the batch from `position` on: the next epoch's if the rest of this epoch is dropped."""
        left = -position % self.num_samples or self.num_samples
        return position + left if self.last == "drop" and left < self.batch else position

    def samples_at(self, position: int) -> list[int]:
        """This rank's samples of the batch at `position`."""
        first, count = position + self.rows.start, len(self.rows)
        begin = position - position % self.num_samples
        if self.last == "pad" and first + count > begin + self.num_samples:
            places = ((row - begin) % self.num_samples for row in range(first, first + count))
            return [self.order.take(begin + place, 1)[0] for place in places]
        return self.order.take(first, count)

    def __iter__(self) -> EpochRest:
        return EpochRest(self, max(self._position, self._begin))

    def __len__(self) -> int:
        """The number of batches in the next pass."""
        position = max(self._position, self._begin)
        left = (position // self.num_samples + 1) * self.num_samples - position
        return left // self.batch if self.last == "drop" else -(-left // self.batch)

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self._position, self._position // self.num_samples)

    def state_at(self, position: int, epoch: int) -> dict[str, Any]:
        order = self.order
        fixed = {"num_samples": self.num_samples, "shuffle": order.shuffle, "seed": order.seed}
        return {"position": position, "epoch": epoch, **fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of a sampler of the same data, whatever its rows and batch.

        Raises `CheckpointError` where that sampler read other data, or the same data in another order.
        """
        now = self.state_at(0, 0)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"no state of a sampler: found {state!r:.60}")
        for key in now:
            if key not in state:
                raise CheckpointError(f"no state of a sampler: found {', '.join(map(str, state)) or 'nothing'}")
            if key not in ("position", "epoch") and state[key] != now[key]:
                raise CheckpointError(
                    f"the sampler was saved with {key}={state[key]!r}, this one has {now[key]!r}; resume with the same "
                    "data set, shuffle and seed, or begin anew with another sampler"
                )
        if not all(type(state[key]) is int and state[key] >= 0 for key in ("position", "epoch")):
            raise CheckpointError(f"no position of a sampler: {state['position']!r:.60}, epoch {state['epoch']!r:.60}")
        self._position = self._begin = self._begin_of_batch(state["position"])

    def handed_out(self, position: int) -> None:
        """Note that a pass has handed out the samples before `position`."""
        if not self.counts_steps:
            self._position = position

    def end_pass(self, position: int) -> None:
        """Note that a pass has ended at `position`, where the next one begins."""
        self._begin = max(self._begin, position)


class EpochRest(Iterator[list[int]]):
    """One pass over the rest of an epoch. It has a state of its own, as loaders read ahead of training."""

    def __init__(self, sampler: RankSampler, position: int):
        self.sampler, self.position = sampler, position
        self.epoch = position // sampler.num_samples

    def __next__(self) -> list[int]:
        if self.position // self.sampler.num_samples > self.epoch:
            self.sampler.end_pass(self.position)
            raise StopIteration
        found = self.sampler.samples_at(self.position)
        self.position = self.sampler.next_position(self.position)
        self.sampler.handed_out(self.position)
        return found

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_at(self.position, self.epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self.position, self.epoch = self.sampler.position, int(state["epoch"])


def lane_rows(batch: int, interface: Interface, lane: int) -> range:
    """The rows of a global batch that one of several lanes computes: the micro-batches of a lane are neighbours."""
    each, first = batch // interface.total_micro_batches, interface.first_micro_batch(lane)
    return range(each * first, each * (first + interface.micro_batches_of(lane)))
