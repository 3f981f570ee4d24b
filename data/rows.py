"""Rows of equal length, and which of them are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compiler.packing.documents import IGNORED


@dataclass(frozen=True)
class Rows:
    """Samples of one length: the inputs of a batch by name."""

    columns: dict[str, Tensor]  # [rows, sequence]; labels of classes: [rows]; of images: [rows, images, ...]
    uneven: dict[str, list[Tensor]] = field(default_factory=dict)  # of images of several sizes: a tensor for each row

    @property
    def labels(self) -> Tensor:
        return self.columns["labels"]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def num_tokens(self) -> int:
        """Of one row, of all its inputs."""
        return sum(column.shape[1] for name, column in self.columns.items() if name.endswith("input_ids"))

    def describe(self) -> str:
        """In words: "64 tokens each", or of several inputs each of them."""
        sizes = {name: column.shape[1] for name, column in self.columns.items() if name.endswith("input_ids")}
        if "labels" in self.columns and self.labels.dim() > 1 and self.labels.shape[1] not in sizes.values():
            sizes["labels"] = self.labels.shape[1]
        images = ", images of several sizes" if self.uneven else ""
        if len(sizes) == 1:
            return f"{next(iter(sizes.values()))} tokens each{images}"
        return ", ".join(f"{count} tokens of {name}" for name, count in sizes.items()) + images

    def take(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """These rows as one batch, in which the images of all rows come one after another."""
        chosen = self._choose(indices)
        found = {name: column.flatten(0, 1) if column.dim() > 2 else column for name, column in chosen.columns.items()}
        return found | {name: torch.cat(column) for name, column in chosen.uneven.items()}

    def take_parts(self, indices: Sequence[int], count: int) -> list[dict[str, Tensor]]:
        """These rows as a list of `count` micro-batches."""
        each = len(indices) // count
        return [self.take(indices[i * each : (i + 1) * each]) for i in range(count)]

    def order_by_size(self) -> list[int]:
        """The rows in the order of what their images take."""
        sizes = [sum(column[i].numel() for column in self.uneven.values()) for i in range(len(self))]
        return sorted(range(len(self)), key=lambda i: -sizes[i])

    def _choose(self, indices: Sequence[int]) -> Rows:
        chosen = torch.tensor(list(indices), dtype=torch.long)  # the dtype matters if there are no indices
        uneven = {name: [column[i] for i in indices] for name, column in self.uneven.items()}
        return Rows({name: column[chosen] for name, column in self.columns.items()}, uneven)

    def _fill_labels(self, length: int) -> Rows:
        labels = pad(self.labels, (0, length - self.labels.shape[1]), value=IGNORED)
        return replace(self, columns={**self.columns, "labels": labels})

    def split(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """Split into (the other rows, `fraction` of the rows), chosen at random by `seed` alone."""
        order = _order(len(self), seed).tolist()
        count = round(fraction * len(self))
        parts = (sorted(order[count:]), sorted(order[:count]))
        rest, held = (self._choose(part) for part in parts)
        return rest, held


def with_labels_alike(*parts: Rows) -> list[Rows]:
    """The parts, whose rows of labels are filled up to the length of the longest with some that do not count."""
    longest = max(part.labels.shape[1] for part in parts)
    return [part._fill_labels(longest) for part in parts]


def evaluation_batches(rows: Rows, batch: int) -> Iterator[tuple[Rows, range]]:
    """Batches as (rows, the numbers of those that count), in order; the last batch is filled up with copies of the
    first rows, of which no label counts."""
    for start in range(0, len(rows), batch):
        counted = range(start, min(start + batch, len(rows)))
        found = rows._choose([i % len(rows) for i in range(start, start + batch)])
        for name, column in found.columns.items():
            if name.endswith("labels"):
                column[len(counted) :] = IGNORED
        yield found, counted


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
