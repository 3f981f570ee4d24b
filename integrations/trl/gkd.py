"""`PenstockGKDTrainer`: TRL's GKDTrainer, on answers that are given, on the hardware that you name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.experimental.gkd import GKDConfig, GKDTrainer

from ...compiler.preference import IGNORED, PARTS
from ...ir.errors import PlanError
from ..transformers.loss import TracedLoss
from ..transformers.steps import StepsByJob
from .arguments import LOSSES, OF_GKD, refuse_images, settle_config
from .pairs import pad_rows
from .row_steps import RowBatch, RowSteps


class PenstockGKDTrainer(StepsByJob, GKDTrainer):
    """As `GKDTrainer` with `lmbda=0.0`; see `StepsByJob` for what it takes beside. The teacher is a part of the job."""

    config = GKDConfig
    refused = OF_GKD
    not_taken = RowSteps.not_taken
    not_called = LOSSES

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, **kwargs: Any):
        refuse_images(kwargs.get("train_dataset"), type(self).__name__)
        args = settle_config(self, model, args, kwargs, lmbda=0.0)
        super().__init__(model=model, teacher_model=teacher_model, args=args, **kwargs)
        self.teacher_model.to("cpu").requires_grad_(False).eval()
        length = self.max_length or args.max_length or getattr(self.data_collator, "max_length", None)
        if length is None:
            raise PlanError("GKDConfig(max_length=None) with a data_collator of your own: set max_length")
        self._row_length = length

    def _module(self) -> nn.Module:
        model: Any = self.model
        compute = partial(_distillation_loss, teacher=self.teacher_model, beta=self.beta)
        return TracedLoss(model, compute, teacher=self.teacher_model)

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        return pad_rows({name: inputs[name] for name in PARTS}, self._row_length, pad_id=0)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return StepsByJob.training_step(self, model, self._rows_of(inputs), num_items_in_batch)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        given = inputs if self.job is None else self._rows_of(inputs)
        return super().prediction_step(model, given, prediction_loss_only, ignore_keys)


def _distillation_loss(model: Any, batch: RowBatch, teacher: nn.Module, beta: float) -> RowBatch:
    """The generalised Jensen-Shannon divergence of student and teacher (Agarwal et al. 2024, equation 1), over the
    tokens that count."""
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**asked).logits
    with torch.no_grad():
        taught = teacher(**asked).logits[:, :-1].log_softmax(-1)
    own, counted = logits[:, :-1].log_softmax(-1), batch["labels"][:, 1:].ne(IGNORED)
    if beta in (0, 1):
        divergence = _kl(taught, own) if beta == 0 else _kl(own, taught)
    else:
        share = torch.tensor(beta)
        mixed = torch.logaddexp(own + torch.log1p(-share), taught + share.log())
        divergence = beta * _kl(taught, mixed) + (1 - beta) * _kl(own, mixed)
    return {"loss": (divergence * counted).sum() / counted.sum(), "logits": logits}


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """For each token the divergence of `second` from `first`, both as logarithms."""
    return (first.exp() * (first - second)).sum(-1)
