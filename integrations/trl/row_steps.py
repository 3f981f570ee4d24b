"""Steps of TRL's trainers whose examples are rows of several inputs, such as pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import IntervalStrategy

from ...compiler.job.job import Job
from ..transformers.batches import count_rows, gather_batch, take_rows
from ..transformers.steps import StepsByJob
from .arguments import LOSSES, NO_LOGITS, OF_TRL, OWN_LOSS, refuse_images, refuse_routers, settle_config
from .pair_loss import BASE, COPY
from .pairs import longest_column

RowBatch = dict[str, Tensor]


class RowSteps(StepsByJob):
    """Mixed in before a trainer of TRL's. `_rows_of` gives the rows of its batches; the module of `_module` gives the
    loss and results of each row, of which `_metrics_of` makes what is logged."""

    config: Any  # the class of TRL's config
    refused: Mapping[str, str] = OF_TRL  # options of the config -> what works instead
    not_taken: Mapping[str, str] = {"compute_loss_func": OWN_LOSS, "compute_metrics": NO_LOGITS}  # arguments
    not_called = LOSSES
    columns: tuple[str, ...]  # of the data sets: token ids, each after those of `prompt`
    prompt = ""
    counts_tokens = True  # whether `num_tokens` is logged
    ref_model: Any = None
    precompute_ref_logps: bool
    _metrics: Any
    _row_length: int
    _total_train_tokens: int = 0

    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        refuse_images(kwargs.get("train_dataset"), type(self).__name__)
        super().__init__(model=model, args=settle_config(self, model, args, kwargs), **kwargs)
        self.max_length = kwargs.get("max_length")  # some of TRL's trainers set it to the config's, for their data
        refuse_routers(self)
        if self.ref_model is not None:
            self.ref_model.to("cpu").requires_grad_(False)
        self._row_length = self._longest_row()

    def _longest_row(self) -> int:
        config: Any = self.args
        longest = self.max_length or longest_column(self._datasets(), self.columns, config.max_length, self.prompt)
        multiple = config.pad_to_multiple_of or 1
        return -(-longest // multiple) * multiple

    def _rows_of(self, inputs: Mapping[str, Any]) -> RowBatch:
        raise NotImplementedError

    def _metrics_of(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The figures that TRL logs, of the rows of all ranks."""
        raise NotImplementedError

    def _log_metrics(self, mode: str, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self._metrics[mode][name].append(value)

    # --- a reference

    def _reference(self) -> Any:
        """The reference as `WithReference` takes it."""
        if self.ref_model is not None or self.precompute_ref_logps:
            return self.ref_model
        model: Any = self.model
        return COPY if COPY in model.peft_config else BASE

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_device():
            return super()._precompute_ref_logps(*args, **kwargs)

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
        batch = self._each_once(gather_batch(self.accelerator, self._form.pad(self._rows_of(inputs))))
        found = []
        for first in range(0, count_rows(batch), self._form.rows):
            part = take_rows(batch, first, min(first + self._form.rows, count_rows(batch)))
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
