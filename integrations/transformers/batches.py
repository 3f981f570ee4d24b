"""Global batches of one shape, out of the batches that a Trainer's collator makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...compiler.batches.shape import number_of_rows
from ...compiler.packing.documents import IGNORED
from ...ir.errors import BatchError

TOKENS = "input_ids"
AS_LONG_AS = {"decoder_input_ids": "labels", "decoder_attention_mask": "labels"}  # where the collator makes them
PADDED = (
    TOKENS, "labels", "attention_mask", "token_type_ids", "mm_token_type_ids", "decoder_input_ids",
    "decoder_attention_mask",
)  # fmt: skip


@dataclass(frozen=True)
class BatchForm:
    """The shape of a step's batch: its rows, and for inputs of token ids and the like their lengths. `takes_fewer`:
    whether the job takes a short batch as it is."""

    rows: int
    lengths: Mapping[str, int]
    pad_id: int = 0
    takes_fewer: bool = False

    def pad(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The batch on the host, each input at its length.

        Raises `BatchError` for one that is longer, or that nothing says how to pad.
        """
        unmasked = TOKENS in batch and "attention_mask" not in batch
        return {name: self._pad_value(name, value, unmasked) for name, value in batch.items()}

    def _pad_value(self, name: str, value: Any, unmasked: bool) -> Tensor:
        if not isinstance(value, Tensor):
            raise BatchError(f"the batch's {name!r} is a {type(value).__name__}; a Job takes tensors")
        length = self.lengths.get(name)
        if length is None or value.dim() != 2 or value.shape[1] == length:
            return value.cpu()
        found = f"the batch's {name!r} has rows of {value.shape[1]}, and those of this run have {length}"
        if value.shape[1] > length:
            raise BatchError(f"{found}; give the trainer max_length={value.shape[1]} or more, or truncate the rows")
        fill = dict.fromkeys(PADDED, 0) | {TOKENS: self.pad_id, "decoder_input_ids": self.pad_id, "labels": IGNORED}
        if name not in fill or unmasked:
            what = "there is no attention_mask" if unmasked else "nothing says how to pad it"
            raise BatchError(f"{found}, and {what}; pad all rows to one length: padding='max_length'")
        return functional.pad(value, (0, length - value.shape[1]), value=fill[name]).cpu()

    def shorten(self, batches: list[Any]) -> BatchForm:
        """The same, no longer than the longest of these batches."""
        lengths = {name: max(batch[name].shape[1] for batch in batches) for name in self.lengths if name in batches[0]}
        return replace(self, lengths=lengths)

    def fill(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill the batch up to the rows of every step: copies of the first row, of which no label counts."""
        missing = self.rows - count_rows(batch)
        if missing == 0 or self.takes_fewer:
            return batch
        found = self.repeat(batch)
        labels = found["labels"]
        labels[-missing * len(labels) // self.rows :] = IGNORED
        return found

    def repeat(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch with the rows of every step, the missing ones as copies of the first."""
        first, missing = take_rows(batch, 0, 1), self.rows - count_rows(batch)
        return {name: torch.cat([value, *[first[name]] * missing]) for name, value in batch.items()}

    def has_own_sizes(self, batches: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether these batches have images of several sizes or numbers, by which a step takes them one by one."""
        if not any(name.startswith("pixel_values") for name in batches[0]):
            return False
        images = [{k: v for k, v in batch.items() if k not in self.lengths and k != "labels"} for batch in batches]
        shapes = [{name: value.shape[1:] for name, value in each.items()} for each in images]
        grids = [v for each in images for v in each.values() if v.dim() == 2 and not v.is_floating_point()]
        uneven = any(len(value) % count_rows(batch) for batch in batches for value in batch.values())
        return uneven or shapes.count(shapes[0]) < len(shapes) or any(len(grid.unique(dim=0)) > 1 for grid in grids)

    def fill_list(self, batches: Sequence[dict[str, Tensor]], count: int) -> list[dict[str, Tensor]]:
        """Fill a list of micro-batches up to this number: copies of the first, of which no label counts."""
        ignored = {**batches[0], "labels": torch.full_like(batches[0]["labels"], IGNORED)}
        return [*batches, *[ignored] * (count - len(batches))]


def form_of(
    batch: Mapping[str, Tensor], rows: int, datasets: Iterable[Any], max_length: int | None, multiple: int, pad_id: int
) -> BatchForm:
    """The form of a run whose first batch this is. Lengths are `max_length`, or those of the longest rows, or the first
    batch's where rows are no token ids; `multiple`: what the collator makes lengths a multiple of."""
    longest = {} if max_length is not None else longest_rows(datasets)
    lengths, width = {}, batch[TOKENS].shape[1] if TOKENS in batch and batch[TOKENS].dim() == 2 else None
    for name, value in batch.items():
        is_long = width is None or value.shape[1:] == (width,) or name in PADDED
        if value.dim() == 2 and not value.is_floating_point() and is_long:  # else it has classes, features or sizes
            own = AS_LONG_AS.get(name, name)
            known = max_length or longest.get(own) or longest.get(TOKENS) or 0
            known = -(-known // multiple) * multiple
            lengths[name] = known if max_length else max(known, value.shape[1])
    return BatchForm(rows, lengths, pad_id)


def longest_rows(datasets: Iterable[Any]) -> dict[str, int]:
    """For each list of numbers in the rows of these data sets, the most that a row has. Empty where rows have none."""
    found: dict[str, int] = {}
    for dataset in datasets:
        if (lengths := _arrow_lengths(dataset)) is not None:
            found |= {name: max(length, found.get(name, 0)) for name, length in lengths.items()}
        elif isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and len(dataset):
            for number in range(len(dataset)):
                row = dataset[number]
                if not isinstance(row, Mapping) or TOKENS not in row:
                    break
                for name, value in row.items():
                    if _is_list_of_numbers(value):
                        found[name] = max(found.get(name, 0), len(value))
    return found


def _arrow_lengths(dataset: Any) -> dict[str, int] | None:
    """The same for a data set of Arrow tables, whose rows need not be read one by one; None for another one."""
    kind = getattr(dataset, "format", None)
    if not isinstance(kind, Mapping) or kind["type"] == "custom" or TOKENS not in dataset.column_names:
        return None
    from pyarrow import compute, types

    found: dict[str, int] = {}
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for name, column in zip(table.column_names, table.columns, strict=True):
            is_list = types.is_list(column.type) or types.is_large_list(column.type)
            if is_list and types.is_integer(column.type.value_type):
                longest = compute.max(compute.list_value_length(column)).as_py()
                found[name] = max(found.get(name, 0), longest or 0)
    return found


def _is_list_of_numbers(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 1
    return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], int))


def join_batches(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches of one shape as one."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def gather_batch(accelerator: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of all processes, on the host."""
    if accelerator.num_processes == 1:
        return batch
    return {name: accelerator.gather(value.to(accelerator.device)).cpu() for name, value in batch.items()}


def count_rows(batch: Mapping[str, Tensor]) -> int:
    """The rows of a batch, of which some inputs may have several entries each, such as patches of images."""
    of_rows = next((batch[name] for name in (TOKENS, "labels") if name in batch), None)
    return number_of_rows([len(value) for value in batch.values()]) if of_rows is None else len(of_rows)


def take_rows(batch: Mapping[str, Tensor], first: int, end: int) -> dict[str, Tensor]:
    """The rows from `first` to before `end`. Raises `BatchError` for an input whose entries do not tell their row."""
    rows = count_rows(batch)
    for name, value in batch.items():
        if len(value) % rows:
            raise BatchError(
                f"the batch's {name!r} has {len(value)} entries for {rows} rows, so that nothing says which belong to "
                "a row: allowed is the same number for each row, such as images of one size"
            )
    return {name: value[first * len(value) // rows : end * len(value) // rows] for name, value in batch.items()}
