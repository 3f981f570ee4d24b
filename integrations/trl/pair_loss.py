"""The losses of `DPOConfig.loss_type` that are a mean over pairs, and the module that makes them of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl.trainer.utils import use_adapter

from ...compiler.preference import IGNORED, PARTS, label_log_probs

REFERENCE = ("chosen_reference", "rejected_reference")  # in a batch: the reference's log probabilities, found before
BASE, COPY = "base", "ref"  # a reference of adapters: the model without them, or TRL's copy of them


@dataclass(frozen=True)
class PairScores:
    """Per pair the logarithms of policy over reference for both answers, and their numbers of tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    beta: float
    smoothing: float = 0.0
    tau: float = 0.05

    @property
    def margin(self) -> Tensor:
        return self.beta * (self.chosen - self.rejected)

    @property
    def margin_per_token(self) -> Tensor:
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)


def _robust(s: PairScores) -> Tensor:
    kept, turned = F.logsigmoid(s.margin), F.logsigmoid(-s.margin)
    return (s.smoothing * turned - (1 - s.smoothing) * kept) / (1 - 2 * s.smoothing)


def _exo(s: PairScores) -> Tensor:
    """The divergence of the softmax over both answers from labels that are wrong with probability `smoothing`."""
    chosen, rejected = F.logsigmoid(s.margin), F.logsigmoid(-s.margin)
    wrong = torch.tensor(s.smoothing)
    return chosen.exp() * (chosen - torch.log1p(-wrong)) + rejected.exp() * (rejected - wrong.log())


def _nca(s: PairScores) -> Tensor:
    chosen, rejected = s.beta * s.chosen, s.beta * s.rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _discopop(s: PairScores) -> Tensor:
    mixed = (s.margin / s.tau).sigmoid()
    return mixed * (-s.margin).exp() - (1 - mixed) * F.logsigmoid(s.margin)


PAIR_LOSSES: dict[str, Callable[[PairScores], Tensor]] = {
    "sigmoid": lambda s: -F.logsigmoid(s.margin),
    "sigmoid_norm": lambda s: -F.logsigmoid(s.beta * s.margin_per_token),
    "hinge": lambda s: (1 - s.margin).relu(),
    "ipo": lambda s: (s.margin_per_token - 0.5 / s.beta).square(),
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "bco_pair": lambda s: -F.logsigmoid(s.beta * s.chosen) - F.logsigmoid(-s.beta * s.rejected),
    "sppo_hard": lambda s: (s.chosen - 0.5 / s.beta).square() + (s.rejected + 0.5 / s.beta).square(),
    "apo_zero": lambda s: 1 - (s.beta * s.chosen).sigmoid() + (s.beta * s.rejected).sigmoid(),
    "apo_down": lambda s: (s.beta * s.chosen).sigmoid() + 1 - s.margin.sigmoid(),
    "discopop": _discopop,
}


class WithReference(nn.Module):
    """A model and its reference: a frozen model, the model with other adapters or with none, or None where the batch
    has the reference's numbers."""

    def __init__(self, model: nn.Module, reference: nn.Module | str | None):
        super().__init__()
        self.model: Any = model
        self.frozen = reference if isinstance(reference, nn.Module) else None
        self.adapter = reference if isinstance(reference, str) else None

    def reference_log_probs(self, rows: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), self._disable_adapter():
            return label_log_probs(self.model if self.frozen is None else self.frozen, **rows)

    def _disable_adapter(self) -> AbstractContextManager[Any]:
        if self.frozen is not None:
            return nullcontext()
        return self.model.disable_adapter() if self.adapter == BASE else use_adapter(self.model, self.adapter)


class PreferenceLoss(WithReference):
    """The loss of pairs by a model and its reference."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | str | None,
        kinds: Sequence[tuple[str, float]],
        beta: float,
        smoothing: float,
        tau: float,
    ):
        super().__init__(model, reference)
        self.kinds, self.beta, self.smoothing, self.tau = tuple(kinds), beta, smoothing, tau

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        rows = {part: torch.cat([batch[f"chosen_{part}"], batch[f"rejected_{part}"]]) for part in PARTS}
        policy = label_log_probs(self.model, **rows)
        reference = self._reference(rows, batch)
        chosen, rejected = (policy - reference).chunk(2)
        chosen_tokens, rejected_tokens = rows["labels"].ne(IGNORED).sum(1).chunk(2)
        scores = PairScores(chosen, rejected, chosen_tokens, rejected_tokens, self.beta, self.smoothing, self.tau)
        losses = sum(weight * PAIR_LOSSES[kind](scores) for kind, weight in self.kinds)
        assert isinstance(losses, Tensor)
        chosen_log_probs, rejected_log_probs = policy.detach().chunk(2)
        return {
            "loss": losses.mean(),
            "losses": losses.detach(),
            "chosen_rewards": self.beta * chosen.detach(),
            "rejected_rewards": self.beta * rejected.detach(),
            "chosen_log_probs": chosen_log_probs,
            "rejected_log_probs": rejected_log_probs,
        }

    def _reference(self, rows: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        if REFERENCE[0] in batch:
            return torch.cat([batch[name] for name in REFERENCE])
        return self.reference_log_probs(rows)
