"""What turns a Trainer of transformers into one whose steps a `Job` takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.api import compile as compile_job
from ...compiler.job.job import Job
from ...ir.errors import PlanError
from .refusals import refuse_arguments, refuse_trainer, require_torch_optimizer, require_whole_batches
from .schedule import make_schedule

if TYPE_CHECKING:
    Host = Any  # the Trainer that stands behind the mixin
else:
    Host = object

FOLDER = "penstock"  # the job's part of a checkpoint


class StepsByJob(Host):
    """Mixed in before a Trainer. The Trainer's optimizer never steps: it holds the learning rates that are logged."""

    optimizer: Any
    lr_scheduler: Any
    own_loss: Any = None  # the `compute_loss` that is the model's own

    def __init__(
        self, *args: Any, hardware: Any = "auto", compile_options: Mapping[str, Any] | None = None, **kwargs: Any
    ):
        self.hardware, self.compile_options = hardware, dict(compile_options or {})
        self.job: Job | None = None
        self._taken_batches: list[Any] = []
        self._waiting: list[Any] = []
        self._checkpoint: str | None = None
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            refuse_arguments(given)
        super().__init__(*args, **kwargs)
        refuse_arguments(self.args)
        refuse_trainer(self, type(self).own_loss)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The job's devices have the weights."""

    # --- training

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            job, self.job = self.job, None
            if job is not None:
                job.close()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.optimizer, self.lr_scheduler = None, None
        rows = getattr(self.train_dataset, "__len__", None)
        if rows is not None:
            require_whole_batches(self.args, rows(), len(train_dataloader), self._train_batch_size, max_steps)
        kind, self._optimizer_options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        require_torch_optimizer(kind, str(getattr(self.args.optim, "value", self.args.optim)))
        self._optimizer_class = kind
        self.create_optimizer()
        self.create_scheduler(max_steps)
        self._total_steps, self._checkpoint, self._waiting = max_steps, resume_from_checkpoint, []
        if resume_from_checkpoint is not None:
            if not (Path(resume_from_checkpoint) / FOLDER).exists():
                raise PlanError(
                    f"resume_from_checkpoint={resume_from_checkpoint!r} has no {FOLDER!r}: it was saved by another "
                    "trainer; load its model and begin anew"
                )
            state = torch.load(Path(resume_from_checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._taken_batches, self._waiting = found[0], []
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Nothing until all parts of the global batch are there; then a step of the job, whose loss is that of all."""
        self._waiting.append(inputs)
        if len(self._waiting) < len(self._taken_batches):
            return torch.zeros((), device=self.args.device)
        batch, self._waiting = _joined(self._waiting), []
        if self.job is None:
            self.job = self._compiled(batch)
        return self.job.step(batch).detach().to(self.args.device)

    def _compiled(self, batch: Any) -> Job:
        args = self.args
        self.model.train()
        options = {
            "optimizer": partial(
                self._optimizer_class, **{k: v for k, v in self._optimizer_options.items() if k != "fused"}
            ),
            "param_groups": [
                {"params": group["params"], "weight_decay": group["weight_decay"]}
                for group in self.optimizer.param_groups
                if group["params"]
            ],
            "lr_scheduler": partial(
                make_schedule,
                name=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                warmup_steps=args.get_warmup_steps(self._total_steps),
                total_steps=self._total_steps,
                **(args.lr_scheduler_kwargs or {}),
            ),
            "max_grad_norm": args.max_grad_norm or None,
            "precision": "bf16-mixed" if args.bf16 else "fp16-mixed" if args.fp16 else "fp32",
            "seed": args.seed,
            "steps": self._total_steps,
        }
        job = compile_job(self.model, self.hardware, example_inputs=batch, **{**options, **self.compile_options})
        if self._checkpoint is not None:
            job.resume(Path(self._checkpoint) / FOLDER)
        return job

    def _clip_grad_norm(self, model: Any) -> None:
        """The job clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """It is asked for only where it is logged, because it waits for the end of the step."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.job is not None and self.job.last is not None:
            grad_norm = self.job.last.gradient_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._sync()
        return super()._finalize_training(*args, **kwargs)

    # --- what reads the weights

    def _sync(self) -> None:
        if self.job is not None:
            self.job.sync()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._sync()
        self.model.to(self.args.device)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.model.to("cpu")

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._sync()
        super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.job is not None, "checkpoints are saved behind steps"
        self.job.save(Path(output_dir) / FOLDER)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")


def _joined(batches: list[Any]) -> dict[str, Tensor]:
    """The micro-batches as one global batch. Raises `PlanError` where their shapes differ."""
    found = {}
    for name in batches[0]:
        shapes = {tuple(batch[name].shape[1:]) for batch in batches}
        if len(shapes) > 1:
            raise PlanError(
                f"the batches of {name!r} have rows of shapes {sorted(shapes)}; pad all to one length: "
                "tokenizer(..., padding='max_length', max_length=...)"
            )
        found[name] = torch.cat([batch[name] for batch in batches]).cpu()
    return found
