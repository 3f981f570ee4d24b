"""`PenstockAccelerator`: accelerate's `Accelerator`, whose steps a job takes."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import Tensor, nn

from ...ir.errors import PlanError
from ..transformers.features import LEFT_ASIDE, PRECISIONS
from .prepared import PreparedModel

logger = logging.getLogger(__name__)
FOLDER = "penstock"  # the job's part of a saved state
OTHERS = {  # variables that `accelerate launch` sets by its config, and arguments of `Accelerator`
    "ACCELERATE_USE_FSDP": ("fsdp_plugin", "FSDP", "the plan shards over the devices of hardware="),
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed_plugin", "DeepSpeed", "the plan shards and offloads"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_plugin", "Megatron-LM", "the plan chooses the parallelism"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config", "parallelism_config", "the plan chooses it"),
}
HANDLERS = {  # attributes of `Accelerator` for `kwargs_handlers` that are left aside: why
    "ddp_handler": "the plan divides the work",
    "scaler_handler": "the job scales the loss of fp16",
    "autocast_handler": "the job computes in the types of mixed_precision",
}


class PenstockAccelerator(Accelerator):
    """As `Accelerator`. A forward of the prepared model in training is a step of a job, with its backward and update;
    `backward`, `step` and `zero_grad` then have nothing left to do.

    hardware, compile_options: for `penstock.compile`.
    max_grad_norm: what the script clips to, as the step is taken before it says so.
    """

    def __init__(
        self,
        *args: Any,
        hardware: Any = "auto",
        compile_options: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ):
        for variable, (argument, name, instead) in OTHERS.items():
            if kwargs.get(argument) is not None or os.environ.get(variable, "false").lower() == "true":
                raise PlanError(
                    f"accelerate's config has {name} ({argument}, {variable}) beside Penstock; leave it out, as "
                    f"{instead}: `accelerate config` with no distributed plug-in, or accelerate launch --multi_gpu"
                )
        super().__init__(*args, **kwargs)
        self.require_one_batch()
        if self.mixed_precision not in PRECISIONS:
            raise PlanError(f"mixed_precision={self.mixed_precision!r}; use one of {', '.join(PRECISIONS)}")
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            backend = self.state.dynamo_plugin.backend.value
            logger.warning("dynamo_backend=%r is left aside: %s", backend, LEFT_ASIDE["torch_compile"])
        for name, reason in HANDLERS.items():
            if (handler := getattr(self, name, None)) is not None:
                logger.warning("kwargs_handlers: %s is left aside: %s", type(handler).__name__, reason)
        self.hardware, self.compile_options, self.max_grad_norm = hardware, dict(compile_options or {}), max_grad_norm
        self.prepared: PreparedModel | None = None
        self.checkpoint: Path | None = None
        atexit.register(self._close)

    def require_one_batch(self) -> None:
        """Raise `PlanError` where a step accumulates several batches."""
        if self.gradient_accumulation_steps > 1:
            raise PlanError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: a step of a Job has one batch, which "
                "the plan cuts into micro-batches; multiply the loader's batch_size by it, and use 1"
            )

    # --- prepare

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.prepared is not None and self.prepared.model is not model:
            raise PlanError("prepare: a second model; a Job trains one. Put both into one module, or prepare one")
        self.prepared = PreparedModel(self, model)
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if self._optimizers:
            raise PlanError("prepare: a second optimizer; use groups of one, with a learning rate each")
        self._optimizers.append(SteppedOptimizer(optimizer, self))
        return self._optimizers[-1]

    # --- a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Nothing: the step has been taken. Raises `PlanError` for another loss than the model's."""
        if self.prepared is None or not self.prepared.accept_loss(loss):
            raise PlanError(
                "accelerator.backward: the loss is not the one that the prepared model returned, so that the step that "
                "was taken is not of it; let forward of the model return this loss (a module around it)"
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the gradients of the step that was taken. Raises `PlanError` where it was not clipped so."""
        if max_norm != self.max_grad_norm or norm_type != 2:
            raise PlanError(
                f"clip_grad_norm_({max_norm!r}, norm_type={norm_type}) comes after the step of a Job, which clips to "
                f"{self.max_grad_norm}; say it before: --max-grad-norm {max_norm:g} of penstock.integrations.launch, "
                "or max_grad_norm= of PenstockAccelerator"
            )
        job = None if self.prepared is None else self.prepared.job
        last = None if job is None else job.last
        norm = None if last is None else last.gradient_norm
        return torch.tensor(0.0 if norm is None else norm, device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise PlanError(f"clip_grad_value_({clip_value!r}): use clip_grad_norm_, or gradient hooks of parameters")

    # --- what reads the weights

    def sync(self) -> None:
        """Give the model the trained weights."""
        if self.prepared is not None:
            self.prepared.sync()

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.sync()
        return model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        self.sync()
        return model.state_dict() if isinstance(model, nn.Module) else super().get_state_dict(model, unwrap)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.sync()
        super().save_model(*args, **kwargs)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.sync()
        found = super().save_state(output_dir, *args, **kwargs)
        if self.prepared is not None and self.prepared.job is not None:
            self.prepared.job.save(Path(found) / FOLDER)
        return found

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        super().load_state(input_dir, *args, **kwargs)
        if input_dir is None or not (Path(input_dir) / FOLDER).exists():
            raise PlanError(
                f"load_state({input_dir!r}): there is no {FOLDER!r} in it, which save_state of a Job writes"
            )
        self.checkpoint = Path(input_dir) / FOLDER
        if self.prepared is not None and self.prepared.job is not None:
            self.prepared.job.resume(self.checkpoint)

    def end_training(self) -> None:
        self._close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        self._close()
        return super().free_memory(*objects)

    def _close(self) -> None:
        if self.prepared is not None:
            self.prepared.close()


class SteppedOptimizer(AcceleratedOptimizer):
    """Holds the groups and rates that the next step of the job has."""

    def __init__(self, optimizer: Any, accelerator: PenstockAccelerator):
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:
        """The job has taken the step."""
        if closure is not None:
            raise PlanError("optimizer.step(closure): a Job takes one forward and backward a step; leave it out")
        if self._accelerator.prepared is not None:
            self._accelerator.prepared.end_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """The job keeps no gradients between steps."""
