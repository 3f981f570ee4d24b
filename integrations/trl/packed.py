"""TRL's packed rows as rows of one length, such that no document attends to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compiler.packing.documents import IGNORED
from ...ir.errors import BatchError

NUM_TOKENS = "num_tokens"  # in a batch: how many of its tokens are no padding


@dataclass(frozen=True)
class PackedCollator:
    """Takes the place of TRL's collator, whose one row per batch has another length in each, and whose numbers for
    flash attention are of one batch. Position ids begin anew with each document; padding is one without targets."""

    pad_token_id: int
    length: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = torch.full((len(rows), self.length), self.pad_token_id)
        labels, positions = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        total = 0
        for number, row in enumerate(rows):
            ids = row["input_ids"]
            end = len(ids)
            if end > self.length:
                raise BatchError(f"a row has {end} tokens, and those of this run have {self.length}; set max_length")
            tokens[number, :end] = torch.as_tensor(ids)
            labels[number, :end] = torch.as_tensor(row.get("labels", ids))
            documents = [*row.get("seq_lengths", [end]), self.length - end]
            positions[number] = torch.cat([torch.arange(size) for size in documents])
            total += end
        labels[positions == 0] = IGNORED
        found = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        return {**found, NUM_TOKENS: torch.tensor(total)}
