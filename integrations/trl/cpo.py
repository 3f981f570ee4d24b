"""`PenstockCPOTrainer`, `PenstockORPOTrainer`: TRL's trainers on pairs without a reference, on the hardware that you
name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from ...compiler.preference import IGNORED, PARTS
from ...ir.errors import PlanError
from ..transformers.loss import TracedLoss
from .arguments import OF_CPO
from .pairs import SIDES, longest_column, pad_rows
from .row_steps import RowBatch, RowSteps, reward_metrics


class _WithoutReference(RowSteps):
    """The common part of both: pairs of TRL's older collator, which has chosen and rejected answers side by side."""

    counts_tokens = False
    refused = OF_CPO
    columns = tuple(f"{side}_input_ids" for side in SIDES)
    max_length: Any
    _stored_metrics: Any
    beta: float

    def _longest_row(self) -> int:
        if self.is_encoder_decoder:
            raise PlanError(f"{type(self).__name__}: an encoder and decoder; use a model that goes on with its input")
        return self.max_length or longest_column(self._datasets(), self.columns, None)

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        found: RowBatch = {}
        for side in SIDES:
            own = {part: inputs[f"{side}_{part}"] for part in PARTS}
            rows = pad_rows(own, self._row_length, self.processing_class.pad_token_id)
            found |= {f"{side}_{part}": value for part, value in rows.items()}
        return found

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        log_probs = [outputs[f"{side}_log_probs"] for side in SIDES]
        found: dict[str, float] = reward_metrics(*(self.beta * self._reward(value) for value in log_probs), *log_probs)
        return found

    def _reward(self, log_probs: Tensor) -> Tensor:
        return log_probs

    def _log_metrics(self, mode: str, found: Mapping[str, float]) -> None:
        prefix = "eval_" if mode == "eval" else ""
        for name, value in found.items():
            self._stored_metrics[mode][f"{prefix}{name}"].append(value)

    def _loss_of(self, outputs: Mapping[str, Tensor]) -> Tensor:
        found = outputs["losses"].mean()
        if "nll_sums" in outputs:
            found = found + self._loss().nll * outputs["nll_sums"].sum() / outputs["nll_counts"].sum()
        return found

    def _loss(self) -> PairsAlone:
        raise NotImplementedError

    def _module(self) -> nn.Module:
        return TracedLoss(self.model, self._loss())


@dataclass(frozen=True)
class PairsAlone:
    """The loss of pairs by `losses` of their log probabilities, and `nll` times the cross entropy of chosen answers,
    over `whole` rows or answers alone. `is_mean`: log probabilities are means over tokens."""

    losses: Callable[[Tensor, Tensor], Tensor]
    nll: float
    whole: bool
    is_mean: bool

    def __call__(self, model: Any, batch: RowBatch) -> RowBatch:
        rows = {part: torch.cat([batch[f"{side}_{part}"] for side in SIDES]) for part in PARTS}
        tokens, attended, labels = (rows[part] for part in PARTS)
        logits = model(input_ids=tokens, attention_mask=attended).logits[:, :-1].float()
        log_probs = -_sums(logits, labels)
        if self.is_mean:
            log_probs = log_probs / labels[:, 1:].ne(IGNORED).sum(-1)
        chosen, rejected = log_probs.chunk(2)
        losses = self.losses(chosen, rejected)
        found = {"losses": losses, "chosen_log_probs": chosen, "rejected_log_probs": rejected}
        loss = losses.mean()
        if self.nll:
            targets = tokens.masked_fill(attended == 0, IGNORED) if self.whole else labels
            (first, _), (wanted, _) = logits.chunk(2), targets.chunk(2)
            found["nll_sums"], found["nll_counts"] = _sums(first, wanted), wanted[:, 1:].ne(IGNORED).sum(-1)
            loss = loss + self.nll * found["nll_sums"].sum() / found["nll_counts"].sum()
        return {"loss": loss, **{name: value.detach() for name, value in found.items()}}


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Per row the cross entropy of its labels, each after the tokens before it."""
    following = labels[:, 1:]
    flat = F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(following.shape).sum(-1)


class PenstockCPOTrainer(_WithoutReference, CPOTrainer):
    """As `CPOTrainer`; see `StepsByJob` for what it takes beside."""

    config = CPOConfig

    def _loss(self) -> PairsAlone:
        return PairsAlone(partial(_cpo, self), self.cpo_alpha, False, self.loss_type in ("ipo", "simpo"))

    def _reward(self, log_probs: Tensor) -> Tensor:
        return _alpha_reward(log_probs, self.alpha)


def _alpha_reward(log_probs: Tensor, alpha: float) -> Tensor:
    return (1 - (-alpha * log_probs).exp()) / alpha if alpha else log_probs


def _cpo(trainer: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Contrastive preference optimisation (Xu et al. 2024), with SimPO's margin and AlphaPO's rewards."""
    beta, wrong = float(trainer.beta), float(trainer.label_smoothing)
    distance = _alpha_reward(chosen, trainer.alpha) - _alpha_reward(rejected, trainer.alpha)
    if trainer.loss_type == "hinge":
        return (1 - beta * distance).relu()
    if trainer.loss_type == "ipo":
        return (distance - 0.5 / beta).square()
    margin = beta * distance - (float(trainer.simpo_gamma) if trainer.loss_type == "simpo" else 0.0)
    losses: Tensor = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
    return losses


class PenstockORPOTrainer(_WithoutReference, ORPOTrainer):
    """As `ORPOTrainer`; see `StepsByJob` for what it takes beside."""

    config = ORPOConfig

    def _loss(self) -> PairsAlone:
        return PairsAlone(partial(_orpo, self.beta), 1.0, True, True)


def _orpo(beta: float, chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds of the chosen answer over those of the rejected one (Hong et al. 2024, equations 4 and 7)."""
    odds = [value - torch.log(-torch.expm1(value)) for value in (chosen, rejected)]
    losses: Tensor = -beta * F.logsigmoid(odds[0] - odds[1])
    return losses
