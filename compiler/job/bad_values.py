"""The values of a batch that no step could compute with: numbers that a table or a loss does not have, and NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...graph.tables.picked_rows import PickBound, PickRules
from ...ir.errors import BatchError
from .counts import part_of


class PickCheck:
    """Checks the numbers by which a step picks rows of embeddings and classes of losses, before anything runs. `picks`
    makes them of the inputs of one micro-batch."""

    def __init__(self, rules: PickRules, picks: nn.Module | None):
        self.rules, self.picks = rules, picks

    def check(self, leaves: Mapping[str, Tensor], micro_batches: int, first_row: int, rows: int) -> None:
        """Raises `BatchError` for a number out of its bounds. `leaves`: `rows` rows from `first_row` on; where an input
        is absent, this rank of torchrun picks nothing."""
        if self.picks is None or not leaves.keys() >= set(self.rules.inputs):
            return
        given = {name: leaves[name] for name in self.rules.inputs}
        for m in range(micro_batches):
            own = part_of(given, m, micro_batches)
            with torch.no_grad():
                found = self.picks(*own.values())
            for bound, numbers in zip(self.rules.bounds, found, strict=True):
                value = _wrong_number(numbers, bound)
                if value is not None:
                    count = rows // micro_batches
                    raise BatchError(_text(bound, value, own, first_row + m * count, count))


def _wrong_number(numbers: Tensor, bound: PickBound) -> int | None:
    """The first number that is out of its bounds."""
    if not numbers.numel():
        return None
    least, most = (int(value) for value in torch.aminmax(numbers))
    if least >= 0 and most < bound.size:
        return None
    wrong = (numbers < 0) | (numbers >= bound.size)
    if bound.ignored is not None:
        wrong &= numbers != bound.ignored
    return int(numbers[wrong][0]) if bool(wrong.any()) else None


def _text(bound: PickBound, value: int, leaves: Mapping[str, Tensor], first: int, count: int) -> str:
    """The error of a number among `count` rows from `first` on."""
    allowed = f"0 to {bound.size - 1}" + ("" if bound.ignored is None else f", and {bound.ignored} is left out")
    for name in bound.inputs:
        places = (leaves[name] == value).nonzero()
        if len(places):
            row = first + int(places[0][0]) * count // len(leaves[name])
            return f"batch[{name!r}] has {value} in row {row}: {bound.of} are {allowed}"
    names = ", ".join(f"batch[{name!r}]" for name in bound.inputs)
    return f"{names}: rows {first} to {first + count - 1} make a {value}: {bound.of} are {allowed}"


def nan_text(leaves: Mapping[str, Tensor]) -> str:
    """A remark on the place where a batch holds NaN; "" where it does not."""
    for name, value in leaves.items():
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            return f" (batch[{name!r}] holds nan in row {int(torch.isnan(value).nonzero()[0][0])})"
    return ""
