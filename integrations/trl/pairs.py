"""TRL's batches of preferences as pairs: a row of each input is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from datasets import IterableDataset
from torch import Tensor

from ...compiler.preference import IGNORED
from ...ir.errors import BatchError, PlanError
from .pair_loss import REFERENCE


def as_pairs(batch: Mapping[str, Tensor], length: int, pad_id: int) -> dict[str, Tensor]:
    """A batch of TRL's collator, the chosen answers above the rejected ones, as a row for each pair of this length."""
    tokens, attended = batch["input_ids"], batch["attention_mask"]
    missing = length - tokens.shape[1]
    if missing < 0:
        raise BatchError(f"an answer has {tokens.shape[1]} tokens, and those of this run have {length}; set max_length")
    labels = tokens.masked_fill(batch["completion_mask"] == 0, IGNORED)
    found = {}
    for name, value, fill in (
        ("input_ids", tokens, pad_id),
        ("attention_mask", attended, 0),
        ("labels", labels, IGNORED),
    ):
        found[f"chosen_{name}"], found[f"rejected_{name}"] = F.pad(value, (0, missing), value=fill).chunk(2)
    for name, known in zip(REFERENCE, ("ref_chosen_logps", "ref_rejected_logps")):
        if known in batch:
            found[name] = batch[known].to(torch.float32)
    return found


def longest_answer(datasets: Iterable[Any], most: int | None) -> int:
    """The most tokens of a prompt with an answer in these data sets, and not above `most`, where longer ones are cut.

    Raises `PlanError` where one of them is a stream, and there is no such limit.
    """
    known = [dataset for dataset in datasets if dataset is not None]
    if any(isinstance(dataset, IterableDataset) for dataset in known):
        if most is None:
            raise PlanError("DPOConfig(max_length=None) with a stream, whose longest pair is not known; set max_length")
        return most
    longest = max(
        len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for d in known for row in d
    )
    return longest if most is None else min(longest, most)
