"""`PenstockDPOTrainer`: TRL's DPOTrainer on the hardware that you name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer

from .arguments import OF_DPO, refuse_dpo
from .pair_loss import PreferenceLoss
from .pairs import as_pairs
from .row_steps import RowSteps, reward_metrics


class PenstockDPOTrainer(RowSteps, DPOTrainer):
    """As `DPOTrainer`; see `StepsByJob` for what it takes beside. The reference is a part of the job."""

    config = DPOConfig
    refused = OF_DPO
    columns, prompt = ("chosen_ids", "rejected_ids"), "prompt_ids"

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any):
        if args is not None:
            refuse_dpo(args)
        super().__init__(model, args, ref_model=ref_model, **kwargs)

    def _module(self) -> nn.Module:
        config: Any = self.args
        model: Any = self.model
        kinds = list(zip(self.loss_types, self.loss_weights, strict=True))
        return PreferenceLoss(model, self._reference(), kinds, self.beta, self.label_smoothing, config.discopop_tau)

    def _rows_of(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return as_pairs(inputs, self._row_length, self._tokenizer.pad_token_id)

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        names = ("chosen_rewards", "rejected_rewards", "chosen_log_probs", "rejected_log_probs")
        found: dict[str, float] = reward_metrics(*(outputs[name] for name in names))
        return found
