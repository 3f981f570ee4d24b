"""Counts over a batch before a step: the values of the inputs that no batch of the user has.

In: the rows of micro-batches, wherever they are. Out: one number per micro-batch for each of `CountRules.divisors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...graph.loss_terms import WEIGHT, CountRules
from ...ir.errors import BatchError
from ...ir.program import Interface, ParamSpec, StageSpec
from ...runtime.device.file import StageClass, open_stages
from ...runtime.source.trust import Trust
from ...runtime.torch_names import tree_map
from ..folder import Settings

LossWeight = Callable[[Any], Any]
T = TypeVar("T")
Counts = list[list[float]]  # of consecutive micro-batches, what is counted in each


def counts_spec(rules: CountRules) -> StageSpec:
    """`Counts` as a stage: the buffers that it holds."""
    buffers = tuple(ParamSpec(name, shape, dtype, False) for name, shape, dtype in rules.buffers)
    return StageSpec("counts", (), (), (), buffers)


def open_counts(settings: Settings, path: Path, trust: Trust) -> Mapping[str, StageClass]:
    """The classes of a folder's file of counts. Raises `VerifyError` with the line of what is wrong with it."""
    rules = settings.counts
    specs = {"counts": counts_spec(rules)} if rules.means else {}
    if rules.transforms:
        specs["divisors"] = StageSpec("divisors", (), (), ())
    if settings.picks.bounds:
        specs["picks"] = StageSpec("picks", (), (), ())
    return open_stages(path, Interface(specs, {}), trust)


class BatchCounts:
    """Counts micro-batches and turns the counts of a whole batch into inputs.

    `counts` takes the rows of one micro-batch; `divisors` takes sums over the batch, and is None where these are the
    divisors. With `loss_weight` the user's own function counts.
    """

    def __init__(
        self,
        rules: CountRules,
        counts: nn.Module | None = None,
        divisors: nn.Module | None = None,
        loss_weight: LossWeight | None = None,
    ):
        self.rules, self.counts, self.divisors, self.loss_weight = rules, counts, divisors, loss_weight

    @staticmethod
    def from_file(settings: Settings, path: Path, buffers: Mapping[str, Tensor], trust: Trust) -> BatchCounts:
        """The counts that a folder's file makes. `buffers`: the values of those of `Counts`."""
        made, rules = open_counts(settings, path, trust), settings.counts
        counts = made["counts"]()
        for name, buffer in counts.named_buffers():
            buffer.copy_(buffers[name])
        return BatchCounts(rules, counts, made["divisors"]() if rules.transforms else None)

    def count(self, batch: Any, leaves: Mapping[str, Tensor], micro_batches: int) -> Counts:
        """The counts of each of the micro-batches that these rows are cut into. Raises `BatchError` where
        `loss_weight` fails, or gives no count."""
        if self.loss_weight is not None:
            return [[self._weight(part_of(batch, m, micro_batches))] for m in range(micro_batches)]
        if self.counts is None:
            return [[] for _ in range(micro_batches)]
        given = {name: leaves[name] for name in self.rules.inputs}
        with torch.no_grad():
            found = (self.counts(*part_of(given, m, micro_batches).values()) for m in range(micro_batches))
            return [[float(number) for number in row] for row in found]

    def _weight(self, rows: Any) -> float:
        assert self.loss_weight is not None
        try:
            weight = float(self.loss_weight(rows))
        except Exception as error:
            raise BatchError(f"loss_weight failed: {type(error).__name__}: {error}") from error
        if not (math.isfinite(weight) and weight >= 0):
            raise BatchError(f"loss_weight gave {weight} for a micro-batch; it is a finite number, 0 or more")
        return weight

    def inputs(self, counts: Counts, own: Sequence[Sequence[int]] | None = None) -> dict[str, Tensor]:
        """The inputs' values, one per micro-batch, of what each counts. `own`: the micro-batches of each mini-batch,
        where these have updates of their own; a term that counts nothing in one is zero there."""
        columns: list[list[float]] = [[0.0] * len(counts) for _ in self.rules.divisors]
        for members in [range(len(counts))] if own is None else own:
            given = [counts[m] for m in members]
            if self.rules.by_user:
                rows = [[share] for share in _shares([weight for (weight,) in given], own is not None)]
            else:
                rows = [self._values(given)] * len(given)
            for m, row in zip(members, rows, strict=True):
                for column, value in zip(columns, row, strict=True):
                    column[m] = value
        return {
            divisor.input: torch.tensor(
                [value or 1.0 for value in column] if own is not None and divisor.input != WEIGHT else column,
                dtype=getattr(torch, divisor.dtype),
            )
            for divisor, column in zip(self.rules.divisors, columns, strict=True)
        }

    def _values(self, counts: Counts) -> list[float]:
        """The divisors of these micro-batches together."""
        columns = list(zip(*counts, strict=True))
        totals = [math.fsum(column) / (len(column) if mean else 1) for column, mean in zip(columns, self.rules.means)]
        if self.divisors is not None:
            totals = [float(value) for value in self.divisors(*(torch.tensor(t, dtype=torch.float64) for t in totals))]
        return [
            value / len(counts) if divisor.spread else value
            for value, divisor in zip(totals, self.rules.divisors, strict=True)
        ]


def _shares(weights: list[float], own: bool) -> list[float]:
    """The factor of each micro-batch's loss, of which an update takes the mean. If all weights are zero: NaN, as
    eager's 0/0; or 0 in a mini-batch with an update of its `own`, which then counts not at all."""
    total = math.fsum(weights)
    return [weight * len(weights) / total if total else 0.0 if own else math.nan for weight in weights]


def mini_batches(interface: Interface) -> list[list[int]]:
    """The micro-batches of each mini-batch, by their numbers in the batch, in which lanes follow one another."""
    lanes = [interface.first_micro_batch(lane) for lane in range(0, max(1, len(interface.lanes)), interface.team)]
    firsts = range(0, interface.micro_batches, interface.accumulate)
    return [[lane + m for lane in lanes for m in range(at, at + interface.accumulate)] for at in firsts]


def part_of(batch: Any, micro_batch: int, count: int) -> Any:
    """The micro-batch of a batch: an equal slice of every tensor along its first dimension."""

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        rows = len(leaf) // count
        return leaf[micro_batch * rows : (micro_batch + 1) * rows]

    return tree_map(part, batch)


def rows_of(batch: Any, rows: range, size: int) -> Any:
    """These of the `size` rows of every tensor of a batch."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or len(leaf) % size:
            return leaf
        each = len(leaf) // size  # entries of this input for each row
        return leaf[rows.start * each : rows.stop * each]

    return tree_map(take, batch)


def merge_lanes(rows: Sequence[list[T] | None], interface: Interface, what: str = "what the loss counts") -> list[T]:
    """Merge the rows that every rank gives for its lane into those of all micro-batches. Raises `BatchError` where no
    rank of a lane, or of a team of lanes, has any."""
    found: list[T] = []
    lanes = interface.lanes or (tuple(range(interface.num_devices)),)
    for first in range(0, len(lanes), interface.team):
        devices = [device for lane in lanes[first : first + interface.team] for device in lane]
        given = next((rows[device] for device in devices if rows[device] is not None), None)
        if given is None:
            raise BatchError(f"none of ranks {', '.join(map(str, devices))} was given {what}")
        found += given
    return found
