"""`PenstockDPOTrainer`: TRL's DPOTrainer on the hardware that you name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer

from ...ir.errors import PlanError
from .arguments import default_folder, refuse_dpo, refuse_images, refuse_routers, with_plan_defaults
from .pair_loss import BASE, COPY, PreferenceLoss
from .pairs import as_pairs, longest_answer
from .row_steps import RowSteps, refuse_metrics, reward_metrics, row_length


class PenstockDPOTrainer(RowSteps, DPOTrainer):
    """As `DPOTrainer`; see `StepsByJob` for what it takes beside. The reference is a part of the job."""

    own_loss = DPOTrainer.compute_loss

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any):
        if args is None:
            args = DPOConfig(default_folder(model, "DPO"))
        refuse_dpo(args)
        refuse_images(kwargs.get("train_dataset"), type(self).__name__)
        refuse_metrics(kwargs)
        if kwargs.get("compute_loss_func") is not None:
            raise PlanError("compute_loss_func: the loss of pairs is loss_type of DPOConfig; leave it out")
        super().__init__(model=model, ref_model=ref_model, args=with_plan_defaults(args), **kwargs)
        refuse_routers(self)
        self._freeze_reference()
        config: Any = self.args
        longest = self.max_length or longest_answer(self._datasets(), config.max_length)
        self._row_length = row_length(longest, config.pad_to_multiple_of)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_device():
            return super()._precompute_ref_logps(*args, **kwargs)

    def _module(self) -> nn.Module:
        config: Any = self.args
        model: Any = self.model
        reference: Any = self.ref_model
        if reference is None and not self.precompute_ref_logps:
            reference = COPY if COPY in model.peft_config else BASE
        kinds = list(zip(self.loss_types, self.loss_weights, strict=True))
        return PreferenceLoss(model, reference, kinds, self.beta, self.label_smoothing, config.discopop_tau)

    def _rows_of(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return as_pairs(inputs, self._row_length, self._tokenizer.pad_token_id)

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        names = ("chosen_rewards", "rejected_rewards", "chosen_log_probs", "rejected_log_probs")
        found: dict[str, float] = reward_metrics(*(outputs[name] for name in names))
        return found
