"""`PenstockDPOTrainer`: TRL's DPOTrainer on the hardware that you name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import IntervalStrategy
from trl import DPOConfig, DPOTrainer

from ...compiler.job.job import Job
from ...ir.errors import PlanError
from ..transformers.batches import count_rows
from ..transformers.steps import StepsByJob
from .arguments import default_folder, refuse_dpo, refuse_images, with_plan_defaults
from .pair_loss import BASE, COPY, PreferenceLoss
from .pairs import as_pairs, longest_answer


class PenstockDPOTrainer(StepsByJob, DPOTrainer):
    """As `DPOTrainer`; see `StepsByJob` for what it takes beside. The reference is a part of the job."""

    own_loss = DPOTrainer.compute_loss

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any):
        if args is None:
            args = DPOConfig(default_folder(model, "DPO"))
        refuse_dpo(args)
        refuse_images(kwargs.get("train_dataset"))
        if kwargs.get("compute_metrics") is not None:
            raise PlanError("compute_metrics: a Job keeps no logits of pairs; the rewards of an evaluation are logged")
        super().__init__(model=model, ref_model=ref_model, args=with_plan_defaults(args), **kwargs)
        if self.aux_loss_enabled:
            raise PlanError(
                f"DPOConfig(router_aux_loss_coef={self.router_aux_loss_coef!r}), by the config or the model's own: the "
                "loss of pairs leaves the routers out; use: 0.0"
            )
        config: Any = self.args
        reference: Any = self.ref_model
        if reference is not None:
            reference.to("cpu").requires_grad_(False)
        longest = self.max_length or longest_answer(self._datasets(), config.max_length)
        multiple = config.pad_to_multiple_of or 1
        self._pair_length = -(-longest // multiple) * multiple

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_device():
            return super()._precompute_ref_logps(*args, **kwargs)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """With the reference there as well."""
        reference: Any = nn.Module() if self.ref_model is None else self.ref_model
        with super()._on_device():
            reference.to(self.args.device)
            try:
                yield
            finally:
                reference.to("cpu")

    # --- training

    def _module(self) -> nn.Module:
        config: Any = self.args
        model: Any = self.model
        reference: Any = self.ref_model
        if reference is None and not self.precompute_ref_logps:
            reference = COPY if COPY in model.peft_config else BASE
        kinds = list(zip(self.loss_types, self.loss_weights, strict=True))
        return PreferenceLoss(model, reference, kinds, self.beta, self.label_smoothing, config.discopop_tau)

    def _pairs(self, inputs: Any) -> dict[str, Tensor]:
        return as_pairs(inputs, self._pair_length, self._tokenizer.pad_token_id)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()  # by which `log` tells a step from an evaluation
        self._total_train_tokens += int(self.accelerator.gather(inputs["attention_mask"].sum()).sum())
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, self._pairs(inputs), num_items_in_batch)

    def _take_step(self, job: Job, batch: dict[str, Tensor]) -> Tensor:
        if self._will_log() and job.folder.settings.evaluation is None:
            self._tell_rewards("train", job.evaluate(batch))
        return super()._take_step(job, batch)

    def _will_log(self) -> bool:
        """Whether the step that begins is one whose rewards are logged, which takes a forward of its batch."""
        step, args = self.state.global_step + 1, self.args
        if step == 1 and args.logging_first_step:
            return True
        return args.logging_strategy == IntervalStrategy.STEPS and step % self.state.logging_steps == 0

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
        batch = self._each_once(self._gather_batches([self._form.pad(self._pairs(inputs))]))
        found = []
        for first in range(0, count_rows(batch), self._form.rows):
            part = {name: value[first : first + self._form.rows] for name, value in batch.items()}
            found.append(_evaluate_pairs(self.job, part, self._form.rows))
        outputs = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        self._tell_rewards("eval", outputs)
        return outputs["losses"].mean().to(self.args.device), None, None

    def _tell_rewards(self, mode: str, outputs: dict[str, Tensor]) -> None:
        """Log the rewards as TRL does, of the pairs of all ranks."""
        chosen, rejected = outputs["chosen_rewards"], outputs["rejected_rewards"]
        for name, values in {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": outputs["chosen_log_probs"],
            "logps/rejected": outputs["rejected_log_probs"],
        }.items():
            self._metrics[mode][name].append(values.mean().item())


def _evaluate_pairs(job: Job, batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The job's results for these pairs, each by itself. The job takes the number of rows of a step."""
    count = count_rows(batch)
    order = torch.arange(rows).where(torch.arange(rows) < count, 0)
    outputs = job.evaluate({name: value[order] for name, value in batch.items()})
    return {name: value[:count] for name, value in outputs.items() if name != "loss"}
