"""Preference training: two forwards of one model in one step, of the policy and of the frozen base as its reference.

In: a PeftModel. Out: a module whose forward takes pairs of a chosen and a rejected answer and gives the loss of direct
preference optimisation (Rafailov et al. 2023, equation 7). The reference is the same model with its adapters off, so
that there is no second copy of the weights; the pass `interleave-forwards` lets a stage run both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir.errors import CaptureError, PlanError
from ..runtime.state.wrapped import PEFT, is_a

IGNORED = -100  # the label of a token that no answer has: the prompt, padding
PARTS = ("input_ids", "attention_mask", "labels")
_ADAPT = (
    'put adapters into the model: peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", '
    'target_modules="all-linear"))'
)


class DPO(nn.Module):
    """Direct preference optimisation of a PeftModel, whose base without adapters is the reference.

    A row of the batch is one pair: `chosen_input_ids`, `chosen_attention_mask`, `chosen_labels`, and the same with
    `rejected_`, each [rows, sequence]. Labels are the tokens, and -100 for those of the prompt and of padding. The
    result has the `loss` and per row `chosen_rewards`, `rejected_rewards` and their difference, `margins`.

    Raises `PlanError` for a model without adapters, or one that trains more than adapters: a reference of its own would
    be a second copy of the weights.
    """

    def __init__(self, model: nn.Module, beta: float = 0.1):
        super().__init__()
        _require_adapters(model)
        if not isinstance(beta, (int, float)) or not beta > 0:
            raise PlanError(f"DPO: beta={beta!r}; it is a number above 0, usually between 0.01 and 0.5")
        self.model: Any = model
        self.beta = float(beta)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        _require_pairs(batch)
        rows = {part: torch.cat([batch[f"chosen_{part}"], batch[f"rejected_{part}"]]) for part in PARTS}
        policy = self.log_probs(**rows)
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.log_probs(**rows)
        chosen, rejected = (self.beta * (policy - reference)).chunk(2)
        return {
            "loss": self.pair_loss(chosen - rejected),
            "chosen_rewards": chosen.detach(),
            "rejected_rewards": rejected.detach(),
            "margins": (chosen - rejected).detach(),
        }

    def pair_loss(self, margins: Tensor) -> Tensor:
        """The loss of the rows' margins between rewards; other losses of pairs override it."""
        return -F.logsigmoid(margins).mean()

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Per row the logarithm of the probability of its labels, each after the tokens before it."""
        return label_log_probs(self.model, input_ids, attention_mask, labels)


def label_log_probs(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Per row the logarithm of the probability that `model` gives its labels, each after the tokens before it."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    following = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    flat = F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="none")
    return -flat.view(following.shape).sum(-1)


def _require_adapters(model: nn.Module) -> None:
    name = type(model).__name__
    if not is_a(model, PEFT):
        raise PlanError(
            f"DPO: {name} is no PeftModel. Its reference would be a frozen copy of all weights; with adapters it is "
            f"the model itself, with its adapters off: {_ADAPT}"
        )
    peft: Any = model
    if peft.active_peft_config.is_prompt_learning:
        kind = type(peft.active_peft_config).__name__
        raise PlanError(f"DPO: {kind} adds tokens, which the reference does not have; use adapters in layers (LoRA)")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PlanError(
            f"DPO: {name} holds an encoder and a decoder; DPO takes models that go on with their input. Write a module "
            "of your own whose forward calls the model twice, as docs/preference.md shows"
        )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    own = (peft.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    beyond = [name for name in trained if not any(mark in name for mark in own)]
    if beyond:
        more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        raise PlanError(
            f"DPO: {beyond[0]}{more} of the base model is trained, and with it the reference would change: freeze it "
            "(requires_grad_(False)), in LoraConfig leave bias=\"none\", or train a copy of the layer (modules_to_save)"
        )
    if not trained:
        raise PlanError("DPO: no adapter is trained; read them with PeftModel.from_pretrained(..., is_trainable=True)")


def _require_pairs(batch: dict[str, Tensor]) -> None:
    names = [f"{side}_{part}" for side in ("chosen", "rejected") for part in PARTS]
    wrong = [name for name in names if name not in batch] or [name for name in batch if name not in names]
    if wrong:
        what = "lacks" if wrong[0] in names else "has"
        raise CaptureError(
            f"the batch of DPO {what} {wrong[0]!r}; its entries are {', '.join(names)}, each [rows, sequence], a pair "
            "in a row"
        )
    first = batch[names[0]]
    if first.dim() != 2 or any(batch[name].shape != first.shape for name in names):
        found = ", ".join(f"{name} {list(batch[name].shape)}" for name in names)
        raise CaptureError(
            f"DPO takes entries of one shape [rows, sequence], found {found}: pad chosen and rejected answers to the "
            "same length, with attention_mask 0 and labels -100"
        )
