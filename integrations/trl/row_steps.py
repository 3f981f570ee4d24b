"""Steps of TRL's trainers whose examples are rows of several inputs, such as pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import IntervalStrategy

from ...compiler.job.job import Job
from ...compiler.preference import IGNORED
from ...ir.errors import BatchError, PlanError
from ..transformers.batches import count_rows
from ..transformers.steps import StepsByJob

RowBatch = dict[str, Tensor]


class RowSteps(StepsByJob):
    """Mixed in before a trainer of TRL's. `_rows_of` gives the rows of its batches; the module of `_module` gives the
    loss and results of each row, of which `_metrics_of` makes what is logged."""

    _metrics: Any
    _row_length: int
    _total_train_tokens: int = 0
    ref_model: Any = None
    counts_tokens = True  # whether `num_tokens` is logged

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        raise NotImplementedError

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The figures that TRL logs, of the rows of all ranks."""
        raise NotImplementedError

    def _log_metrics(self, mode: str, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self._metrics[mode][name].append(value)

    def _freeze_reference(self) -> None:
        if self.ref_model is not None:
            self.ref_model.to("cpu").requires_grad_(False)

    @contextmanager
    def _on_device(self) -> Any:
        """With the reference there as well."""
        reference: Any = nn.Module() if self.ref_model is None else self.ref_model
        with super()._on_device():
            reference.to(self.args.device)
            try:
                yield
            finally:
                reference.to("cpu")

    # --- training

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()  # by which `log` tells a step from an evaluation
        if self.counts_tokens:
            self._total_train_tokens += int(self.accelerator.gather(inputs["attention_mask"].sum()).sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, self._rows_of(inputs), num_items_in_batch)

    def _take_step(self, job: Job, batch: RowBatch) -> Tensor:
        if self._will_log() and job.folder.settings.evaluation is None:
            self._log_metrics("train", self._metrics_of(job.evaluate(batch)))
        return super()._take_step(job, batch)

    def _will_log(self) -> bool:
        """Whether the step that begins is one whose results are logged, which takes a forward of its batch."""
        step, args = self.state.global_step + 1, self.args
        if step == 1 and args.logging_first_step:
            return True
        is_due: bool = args.logging_strategy == IntervalStrategy.STEPS and step % self.state.logging_steps == 0
        return is_due

    # --- evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        if self.job is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        reason = self.job.folder.settings.evaluation
        if reason is not None:
            return self._prediction_of_model(model, inputs, True, ignore_keys, reason)
        assert self._form is not None
        batch = self._each_once(self._gather_batches([self._form.pad(self._rows_of(inputs))]))
        found = []
        for first in range(0, count_rows(batch), self._form.rows):
            part = {name: value[first : first + self._form.rows] for name, value in batch.items()}
            found.append(_evaluate_rows(self.job, part, self._form.rows))
        outputs = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        if self.counts_tokens:
            self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        self._log_metrics("eval", self._metrics_of(outputs))
        return self._loss_of(outputs).to(self.args.device), None, None

    def _loss_of(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """The loss of an evaluation by the results of its rows."""
        return outputs["losses"].mean()


def _evaluate_rows(job: Job, batch: RowBatch, rows: int) -> RowBatch:
    """The job's results for these rows, each by itself. The job takes the number of rows of a step."""
    count = count_rows(batch)
    order = torch.arange(rows).where(torch.arange(rows) < count, 0)
    outputs = job.evaluate({name: value[order] for name, value in batch.items()})
    return {name: value[:count] for name, value in outputs.items() if name != "loss"}


def pad_to(value: Tensor, length: int, fill: int) -> Tensor:
    """RowBatch of this length. Raises `BatchError` for longer ones."""
    missing = length - value.shape[1]
    if missing < 0:
        raise BatchError(f"an answer has {value.shape[1]} tokens, and those of this run have {length}; set max_length")
    return F.pad(value, (0, missing), value=fill)


def row_length(longest: int, multiple: int | None) -> int:
    return -(-longest // (multiple or 1)) * (multiple or 1)


def refuse_metrics(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("compute_metrics") is not None:
        raise PlanError("compute_metrics: a Job keeps no logits of rows; what TRL logs of an evaluation is logged")


def reward_metrics(chosen: Tensor, rejected: Tensor, chosen_log_probs: Tensor, rejected_log_probs: Tensor) -> Any:
    """The rewards that TRL logs of pairs."""
    return {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "logps/chosen": chosen_log_probs.mean().item(),
        "logps/rejected": rejected_log_probs.mean().item(),
    }


def counted_labels(tokens: Tensor, completion_mask: Tensor) -> Tensor:
    return tokens.masked_fill(completion_mask == 0, IGNORED)
