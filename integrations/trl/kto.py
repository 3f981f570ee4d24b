"""`PenstockKTOTrainer`: TRL's KTOTrainer on the hardware that you name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from trl import KTOConfig, KTOTrainer

from ...compiler.preference import PARTS, label_log_probs
from .arguments import OF_KTO
from .pair_loss import WithReference
from .pairs import pad_rows, with_labels
from .row_steps import RowBatch, RowSteps

KNOWN = {"": "ref_logps", "kl_": "ref_kl_logps"}  # the reference's log probabilities, where they were computed before


class KTOLoss(WithReference):
    """The loss of answers that are wanted or not, by a model and its reference; its divergence is that of all rows."""

    def __init__(self, model: nn.Module, reference: nn.Module | str | None, args: Any):
        super().__init__(model, reference)
        self.beta, self.kind = args.beta, args.loss_type
        self.wanted, self.unwanted = args.desirable_weight, args.undesirable_weight

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        policy, ratios = self._ratio(batch, "")
        found = {"log_probs": policy.detach(), "ratios": ratios.detach(), "label": batch["label"]}
        if self.kind == "kto":
            with torch.no_grad():
                found["kl_ratios"] = self._ratio(batch, "kl_")[1]
        return {"loss": self.loss(ratios, found), **found}

    def loss(self, ratios: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        is_wanted = rows["label"]
        losses: Tensor = 1 - (self.beta * torch.where(is_wanted, 1.0, -1.0) * (ratios - divergence(rows))).sigmoid()
        return (losses * torch.where(is_wanted, self.wanted, self.unwanted)).mean()

    def _ratio(self, batch: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
        """The model's log probabilities of answers, and their distance from the reference's."""
        rows = {name: batch[f"{prefix}{name}"] for name in PARTS}
        policy = label_log_probs(self.model, **rows)
        known = batch.get(KNOWN[prefix])
        return policy, policy - (self.reference_log_probs(rows) if known is None else known)


def divergence(rows: Mapping[str, Tensor]) -> Tensor:
    """The estimate of the divergence from the reference, of all rows together; 0 for a loss without one."""
    return rows["kl_ratios"].mean().clamp(min=0) if "kl_ratios" in rows else torch.zeros(())


class PenstockKTOTrainer(RowSteps, KTOTrainer):
    """As `KTOTrainer`; see `StepsByJob` for what it takes beside. The estimate of the divergence is that of a step's
    whole batch, so that the batch is one micro-batch."""

    config = KTOConfig
    refused = OF_KTO
    columns, prompt = ("completion_ids", "KL_completion_ids"), "prompt_ids"

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any):
        super().__init__(model, args, ref_model=ref_model, **kwargs)
        if self.calculate_KL:
            self.compile_options.setdefault("micro_batches", 1)

    def _module(self) -> nn.Module:
        model: Any = self.model
        return KTOLoss(model, self._reference(), self.args)

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        inputs = {name.replace("KL_", "kl_"): value for name, value in inputs.items()}
        found = {name: inputs[name] for name in ("label", *KNOWN.values()) if name in inputs}
        for prefix in KNOWN if "kl_input_ids" in inputs else ("",):
            rows = pad_rows(with_labels(inputs, prefix), self._row_length, self._tokenizer.pad_token_id)
            found |= {f"{prefix}{name}": value for name, value in rows.items()}
        return found

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        found, is_wanted = {"kl": divergence(outputs).item()}, outputs["label"]
        rewards = self.beta * outputs["ratios"]
        for word, rows in (("chosen", is_wanted), ("rejected", ~is_wanted)):
            if rows.any():
                found[f"rewards/{word}"] = rewards[rows].mean().item()
                found[f"logps/{word}"] = outputs["log_probs"][rows].mean().item()
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def _loss_of(self, outputs: Mapping[str, Tensor]) -> Tensor:
        return KTOLoss(nn.Module(), None, self.args).loss(outputs["ratios"], outputs)
