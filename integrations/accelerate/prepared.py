"""A prepared model: its forward in training is a step of a job, its forward in evaluation one of the job's programs."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...compiler.api import compile as compile_job
from ...compiler.job.job import Job
from ...compiler.job.outputs import Outputs
from ...compiler.stale import allow_forward
from ...ir.errors import PlanError
from ..said import tell_plan, tell_planning
from ..transformers.batches import BatchForm, count_rows, form_of, gather_batch
from ..transformers.callbacks import SetOptions, set_options
from ..transformers.evaluation import evaluate, shifts_labels
from ..transformers.features import PRECISIONS
from ..transformers.optimizers import OptimizerOf
from ..transformers.short_batches import compile_for_all_rows, why_not_short

logger = logging.getLogger(__name__)


class NoGradient(Tensor):
    """Takes the place of a gradient, which was on the job's devices: whatever reads it raises `PlanError`."""

    @staticmethod
    def like(param: Tensor) -> Tensor:
        return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape).as_subclass(NoGradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PlanError(
            "a gradient is read between backward and step, which a Job has taken as a whole: use "
            "accelerator.clip_grad_norm_ for torch.nn.utils.clip_grad_norm_, and gradient hooks "
            "(parameter.register_hook) for others"
        )


class PreparedModel:
    """Takes the place of a model's forward. The model itself has the weights of the last `sync`."""

    def __init__(self, accelerator: Any, model: nn.Module):
        self.accelerator, self.model = accelerator, model
        self.job: Job | None = None
        self.loss: Tensor | None = None  # of the last step
        self._form: BatchForm | None = None
        self._optimizer: OptimizerOf | None = None
        self._set: SetOptions | None = None
        self._due = ""  # the call that the script owes to the last step
        self._synced_step, self._is_told = -1, False
        self._replace_forward()

    def _replace_forward(self) -> None:
        original = type(self.model).forward

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(inspect.signature(original).bind(model, *args, **kwargs).arguments)
            batch = {**dict(list(given.items())[1:]), **given.get("kwargs", {})}
            batch = {name: value for name, value in batch.items() if value is not None and name != "kwargs"}
            return self._step(batch) if model.training and torch.is_grad_enabled() else self._evaluate(batch)

        self.model.forward = types.MethodType(forward, self.model)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """With the forward of the model's class."""
        del self.model.forward
        try:
            yield
        finally:
            self._replace_forward()

    # --- training

    def _step(self, given: dict[str, Any]) -> Outputs:
        self.accelerator.require_one_batch()  # a script may set it late
        if self._due:
            raise PlanError(
                f"a second forward in training before {self._due}: a Job has made the update of the first; evaluate "
                "under torch.no_grad(), and for larger steps multiply the loader's batch_size: the plan cuts the batch"
            )
        batch, flags = self._whole(given)
        if self.job is None:
            self._compile(batch, flags)
        assert self.job is not None and self._form is not None and self._optimizer is not None and self._set is not None
        set_options(self.job, self._optimizer.numbers, self._set.take())
        with self._own_forward():
            loss = self.job.step({**self._form.fill(batch), **flags})
        allow_forward(self.model)
        self.loss = loss.detach().to(self.accelerator.device).requires_grad_()
        self._due = "accelerator.backward"
        return Outputs(loss=self.loss)

    def accept_loss(self, loss: Tensor) -> bool:
        """Whether this is the loss of the last step. From then on to `end_step` gradients are refused."""
        if not self._is_loss(loss):
            return False
        self._due = "optimizer.step"
        for param in self.model.parameters():
            if param.requires_grad:
                param.grad = NoGradient.like(param)
        return True

    def end_step(self) -> None:
        self._due = ""
        for param in self.model.parameters():
            param.grad = None

    def _is_loss(self, loss: Tensor) -> bool:
        """Whether this is the loss of the last step, also after a division by one as scripts have it."""
        own = self.loss
        if own is None or loss is own or not loss.requires_grad:
            return own is not None and loss is own
        (slope,) = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)
        return slope is not None and float(slope) == 1 and float(loss.detach()) == float(own.detach())

    def _whole(self, given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The batch of all processes, padded to the run's lengths, and what of it is no tensor."""
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        flags = {name: value for name, value in given.items() if name not in tensors}
        if self._form is None:
            self._form = self._form_of(tensors)
        return gather_batch(self.accelerator, self._form.pad(tensors)), flags

    def _form_of(self, batch: Mapping[str, Tensor]) -> BatchForm:
        loaders = self.accelerator._dataloaders
        active = self.accelerator.gradient_state.active_dataloader
        each = count_rows(batch)
        each = max(each, getattr(active, "total_batch_size", 0) // self.accelerator.num_processes)
        multiple = max(getattr(loader.collate_fn, "pad_to_multiple_of", None) or 1 for loader in loaders or [active])
        pad_id = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
        datasets = [loader.dataset for loader in loaders]
        return form_of(dict(batch), each * self.accelerator.num_processes, datasets, None, multiple, pad_id)

    def _compile(self, batch: dict[str, Tensor], flags: Mapping[str, Any]) -> None:
        accelerator = self.accelerator
        if not accelerator._optimizers:
            raise PlanError("prepare: no optimizer; give prepare the model and its optimizer before the first step")
        assert self._form is not None
        self._optimizer = OptimizerOf.read(self.model, accelerator._optimizers[0])
        self._set = SetOptions(accelerator._optimizers[0], None, None)

        def make(example: dict[str, Tensor], **more: Any) -> Job:
            assert self._optimizer is not None
            options: dict[str, Any] = {
                "optimizer": self._optimizer.maker(),
                "param_groups": list(self._optimizer.groups()),
                "precision": PRECISIONS[accelerator.mixed_precision],
                "max_grad_norm": accelerator.max_grad_norm,
            }
            options |= {**accelerator.compile_options, **more}
            return compile_job(self.model, accelerator.hardware, {**example, **flags}, **options)

        rows, is_main = self._form.rows, accelerator.is_main_process
        example = self._form.repeat(batch)
        with self._own_forward():
            if is_main:
                tell_planning(self.model, accelerator.hardware, example, rows)
            options, ranks = accelerator.compile_options, accelerator.num_processes
            self.job, self._form = compile_for_all_rows(
                make, batch, self._form, self.model, self._short_rows(), options, ranks
            )
            if is_main:
                tell_plan(self.job)
        if accelerator.checkpoint is not None:
            self.job.resume(accelerator.checkpoint)

    def _short_rows(self) -> int | None:
        """The rows of the loader's last batch where it has fewer; 0 where nobody knows; None where none is short."""
        assert self._form is not None
        active = self.accelerator.gradient_state.active_dataloader
        rows = getattr(getattr(active, "dataset", None), "__len__", None)
        if getattr(active, "drop_last", False):
            return None
        return 0 if rows is None else rows() % self._form.rows or None

    # --- evaluation

    def _evaluate(self, given: dict[str, Any]) -> Any:
        """By the job where it takes the batch, else by the model itself, on the accelerator's device."""
        if self.job is None or self._form is None:
            return self._evaluate_model(given)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        reason = self.job.folder.settings.evaluation or ""
        if self.accelerator.num_processes > 1:
            reason = reason or "each process evaluates rows of its own"
        elif tensors.keys() != {name for name, *_ in self.job.folder.settings.batch}:
            reason = reason or "the batch has other inputs than those of training"
        elif rest := count_rows(tensors) % self._form.rows:
            reason = reason or why_not_short(tensors, rest, self.model, self.job, self._form)
        if reason:
            if not self._is_told:
                logger.warning("evaluated by the model on %s, not by the job: %s", self.accelerator.device, reason)
                self._is_told = True
            return self._evaluate_model(given)
        batch = self._form.pad(tensors)
        with self._own_forward():
            loss, found = evaluate(self.job, self._form, batch, shifts_labels(self.model), outputs=True)
        outputs = Outputs({name: self._cut(value, tensors, batch) for name, value in found.items()})
        return outputs if loss is None else Outputs(loss=loss.to(self.accelerator.device), **outputs)

    def _cut(self, value: Tensor, given: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """An output of a padded batch, without the padding."""
        for name, padded in batch.items():
            if value.dim() > 1 and padded.dim() == 2 and value.shape[1] == padded.shape[1]:
                return value[:, : given[name].shape[1]].to(self.accelerator.device)
        return value.to(self.accelerator.device)

    def _evaluate_model(self, given: Mapping[str, Any]) -> Any:
        self.sync()
        device = self.accelerator.device
        self.model.to(device)
        with self._own_forward():
            moved = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in given.items()}
            return self.model(**moved)

    # --- its weights

    def sync(self) -> None:
        if self.job is not None and self._synced_step != self.job.step_count:
            with self._own_forward():
                self.job.sync()
            self._synced_step = self.job.step_count

    def close(self) -> None:
        """End the run; the model has its weights."""
        if self.job is not None:
            self.sync()
            self.job.close()
            self.job, self._due = None, ""
