"""Evaluates a Trainer's batches through the programs of its job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...compiler.job.job import Job
from ...compiler.packing.documents import IGNORED
from .batches import BatchForm, count_rows, take_rows


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss leaves out the first label of each row, as transformers' of causal models does."""
    if not hasattr(model, "loss_type"):
        return False
    kind = model.loss_type or "ForCausalLM"
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return LOSS_MAPPING.get(kind) is ForCausalLMLoss and not is_encoder_decoder


def evaluate(
    job: Job, form: BatchForm, batch: dict[str, Tensor], shifted: bool, outputs: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss and the outputs of a batch of any number of rows, which go through the job some at a time. A loss is the
    mean over all labels that count, or over rows where its terms are. `batch` has the lengths of `form`."""
    total, count = 0.0, 0
    by_rows = all(term.kind in ("mean", "weighted") for term in job.folder.settings.loss)
    found: list[dict[str, Tensor]] = []
    has_loss = True
    rows = count_rows(batch)
    for first in range(0, rows, form.rows):
        part = take_rows(batch, first, min(first + form.rows, rows))
        given = job.evaluate(form.fill(part), outputs=outputs)
        has_loss = "loss" in given
        if has_loss and (here := count_rows(part) if by_rows else _count(part, shifted)):
            total, count = total + float(given.loss) * here, count + here
        kept = {name: value for name, value in given.items() if value.dim()}
        own, filled = count_rows(part), count_rows(part) if form.takes_fewer else form.rows
        found.append({name: value[: len(value) * own // filled] for name, value in kept.items()})
    gathered = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    return torch.tensor(total / count if count else math.nan) if has_loss else None, gathered


def _count(batch: Mapping[str, Tensor], shifted: bool) -> int:
    """The number that the loss of these rows is divided by: their labels, or the rows."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return count_rows(batch)
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED).sum())
