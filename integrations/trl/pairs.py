"""TRL's batches of preferences as pairs: a row of each input is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor

from ...compiler.preference import IGNORED
from ...ir.errors import PlanError
from .pair_loss import REFERENCE
from .row_steps import counted_labels, pad_to


def as_pairs(batch: Mapping[str, Tensor], length: int, pad_id: int) -> dict[str, Tensor]:
    """A batch of TRL's collator, the chosen answers above the rejected ones, as a row for each pair of this length."""
    tokens, attended = batch["input_ids"], batch["attention_mask"]
    labels = counted_labels(tokens, batch["completion_mask"])
    found = {}
    for name, value, fill in (
        ("input_ids", tokens, pad_id),
        ("attention_mask", attended, 0),
        ("labels", labels, IGNORED),
    ):
        found[f"chosen_{name}"], found[f"rejected_{name}"] = pad_to(value, length, fill).chunk(2)
    for name, known in zip(REFERENCE, ("ref_chosen_logps", "ref_rejected_logps")):
        if known in batch:
            found[name] = batch[known].to(torch.float32)
    return found


def longest_answer(datasets: Iterable[Any], most: int | None) -> int:
    """The most tokens of a prompt with an answer in these data sets, not above `most`, where longer ones are cut."""
    return longest_column(datasets, ("chosen_ids", "rejected_ids"), most, "prompt_ids")


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
