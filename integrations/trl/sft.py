"""`PenstockSFTTrainer`: TRL's SFTTrainer on the hardware that you name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from ...compiler.packing.documents import IGNORED
from ..transformers.steps import StepsByJob
from .arguments import LOSSES, OF_SFT, OWN_LOSS, refuse_sft, settle_config
from .packed import NUM_TOKENS, PackedCollator
from .pairs import longest_column


class PenstockSFTTrainer(StepsByJob, SFTTrainer):
    """As `SFTTrainer`; see `StepsByJob` for what it takes beside. Its loss is the model's own."""

    own_loss = SFTTrainer.compute_loss
    config = SFTConfig
    refused = OF_SFT
    not_taken = {"compute_loss_func": OWN_LOSS}
    not_called = LOSSES

    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        args = settle_config(self, model, args, kwargs)
        refuse_sft(args)
        super().__init__(model=model, args=args, **kwargs)
        if self.padding_free:
            length = longest_column(self._datasets(), ("input_ids",), args.max_length)
            self.data_collator = PackedCollator(self._tokenizer.pad_token_id, length)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()  # by which `log` tells a step from an evaluation
        self._total_train_tokens += self._count_tokens(inputs)
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, num_items_in_batch)

    def _count_tokens(self, inputs: Any) -> int:
        """Count the tokens of all ranks' batches without padding, of which nothing stays in `inputs`."""
        own = inputs.pop(NUM_TOKENS, None)
        if own is None:
            own = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
        return int(self.accelerator.gather(torch.as_tensor(own, device=self.args.device)).sum())

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        inputs.pop(NUM_TOKENS, None)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluate_batch(self, batch: dict[str, Tensor], outputs: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        loss, found = super()._evaluate_batch(batch, outputs=True)
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        if "logits" in found:
            self._tell_metrics(found["logits"], batch["labels"])
        return loss, found if outputs else {}

    def _tell_metrics(self, logits: Tensor, labels: Tensor) -> None:
        """The entropy and the token accuracy that TRL logs of an evaluation; the rows are those of all ranks."""
        following = labels[:, 1:]
        counted = following != IGNORED
        chosen = logits[:, :-1][counted].float().log_softmax(-1)
        entropy = -(chosen.exp() * chosen).sum(-1)
        correct = (chosen.argmax(-1) == following[counted]).float()
        for name, values in {"entropy": entropy, "mean_token_accuracy": correct}.items():
            self._metrics["eval"][name].append(values.mean().item() if len(values) else 0.0)
