"""TRL's batches of answers as rows of one length, such as pairs: a row of each input is one pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor

from ...compiler.preference import IGNORED
from ...ir.errors import PlanError
from ..transformers.batches import BatchForm
from .pair_loss import REFERENCE

SIDES = ("chosen", "rejected")


def pad_rows(values: Mapping[str, Tensor], length: int, pad_id: int) -> dict[str, Tensor]:
    """Token ids, masks and labels as rows of this length. Raises `BatchError` for longer rows."""
    return BatchForm(0, dict.fromkeys(values, length), pad_id).pad(values)


def pad_pairs(values: Mapping[str, Tensor], length: int, pad_id: int) -> dict[str, Tensor]:
    """The same of values with the chosen answers above the rejected ones."""
    rows = pad_rows(values, length, pad_id)
    return {f"{side}_{name}": half for name, both in rows.items() for side, half in zip(SIDES, both.chunk(2))}


def as_pairs(batch: Mapping[str, Tensor], length: int, pad_id: int) -> dict[str, Tensor]:
    """A batch of TRL's collator, the chosen answers above the rejected ones, as a row for each pair of this length."""
    found = pad_pairs(with_labels(batch), length, pad_id)
    for name, known in zip(REFERENCE, ("ref_chosen_logps", "ref_rejected_logps")):
        if known in batch:
            found[name] = batch[known].to(torch.float32)
    return found


def with_labels(batch: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Token ids, mask and labels of a batch, whose prompts and padding have no label."""
    tokens, mask, counted = (batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(counted == 0, IGNORED)}


def longest_column(datasets: Iterable[Any], names: Sequence[str], most: int | None, prompt: str = "") -> int:
    """The most tokens in these columns, after those of `prompt`, and not above `most`, where longer rows are cut.

    Raises `PlanError` where one of the data sets is a stream, and there is no such limit.
    """
    known = [dataset for dataset in datasets if dataset is not None]
    if any(isinstance(dataset, IterableDataset) for dataset in known):
        if most is None:
            raise PlanError("max_length=None with a stream, whose longest row is not known; set max_length")
        return most
    longest = max(
        len(row.get(prompt, ())) + max(len(row[name]) for name in names if name in row) for d in known for row in d
    )
    return longest if most is None else min(longest, most)
