"""`PenstockRewardTrainer`: TRL's RewardTrainer on the hardware that you name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl import RewardConfig, RewardTrainer

from ..transformers.loss import TracedLoss
from .pairs import pad_pairs
from .row_steps import RowBatch, RowSteps

NAMES = ("input_ids", "attention_mask")


class PenstockRewardTrainer(RowSteps, RewardTrainer):
    """As `RewardTrainer`; see `StepsByJob` for what it takes beside."""

    config = RewardConfig
    columns = ("chosen_ids", "rejected_ids")

    def _module(self) -> nn.Module:
        config: Any = self.args
        model: Any = self.model
        return TracedLoss(model, partial(_reward_loss, center=config.center_rewards_coefficient or 0.0))

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        tokenizer: Any = self.processing_class
        found = pad_pairs({name: inputs[name] for name in NAMES}, self._row_length, tokenizer.pad_token_id)
        return found | ({"margin": inputs["margin"]} if "margin" in inputs else {})

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        chosen, rejected = outputs["chosen_rewards"], outputs["rejected_rewards"]
        both = torch.cat([chosen, rejected])
        return {
            "min_reward": both.min().item(),
            "mean_reward": both.mean().item(),
            "max_reward": both.max().item(),
            "accuracy": (chosen > rejected).float().mean().item(),
            "margin": (chosen - rejected).mean().item(),
        }


def _reward_loss(model: Any, batch: RowBatch, center: float) -> RowBatch:
    """Bradley and Terry's: the chosen answer of a pair has the higher reward, by its margin where it has one."""
    rows = {name: torch.cat([batch[f"chosen_{name}"], batch[f"rejected_{name}"]]) for name in NAMES}
    chosen, rejected = model(**rows).logits.squeeze(-1).chunk(2)
    losses = -F.logsigmoid(chosen - rejected - batch.get("margin", torch.zeros(())))
    losses = losses + center * (chosen + rejected).square()
    found = {"losses": losses, "chosen_rewards": chosen, "rejected_rewards": rejected}
    return {"loss": losses.mean(), **{name: value.detach() for name, value in found.items()}}
