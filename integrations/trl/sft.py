"""`PenstockSFTTrainer`: TRL's SFTTrainer on the hardware that you name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from ...compiler.packing.documents import IGNORED
from ...ir.errors import BatchError
from ..transformers.steps import StepsByJob
from .arguments import LOSSES, OF_SFT, OWN_LOSS, refuse_sft, settle_config
from .pairs import longest_column

NUM_TOKENS = "num_tokens"  # in a batch: how many of its tokens are no padding


@dataclass(frozen=True)
class PackedCollator:
    """Takes the place of TRL's collator, whose one row per batch has another length in each, and whose numbers for
    flash attention are of one batch. Position ids begin anew with each document; padding is one without targets."""

    pad_token_id: int
    length: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = torch.full((len(rows), self.length), self.pad_token_id)
        labels, positions = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        total = 0
        for number, row in enumerate(rows):
            ids = row["input_ids"]
            end = len(ids)
            if end > self.length:
                raise BatchError(f"a row has {end} tokens, and those of this run have {self.length}; set max_length")
            tokens[number, :end] = torch.as_tensor(ids)
            labels[number, :end] = torch.as_tensor(row.get("labels", ids))
            documents = [*row.get("seq_lengths", [end]), self.length - end]
            positions[number] = torch.cat([torch.arange(size) for size in documents])
            total += end
        labels[positions == 0] = IGNORED
        found = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        return {**found, NUM_TOKENS: torch.tensor(total)}


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
