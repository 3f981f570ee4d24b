"""The options of `TrainingArguments` that no `Job` honours: each by its name, with what works instead."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from transformers import Trainer

from ...ir.errors import PlanError

INSTEAD = {
    "fsdp": "leave it out: the plan shards over the devices of hardware=",
    "deepspeed": "leave it out: the plan shards and offloads over the memories of hardware=",
    "parallelism_config": "leave it out: the plan chooses the parallelism",
    "torch_compile": "compile_options={'compile_stages': True}",
    "gradient_checkpointing": "leave it out: the plan chooses what is computed again",
    "activation_checkpointing": "leave it out: the plan chooses what is computed again",
    "label_smoothing_factor": "0.0, or a model that smooths its own loss",
    "neftune_noise_alpha": "leave it out",
    "use_liger_kernel": "leave it out",
    "torch_empty_cache_steps": "leave it out: the plan keeps memory within its budgets",
    "auto_find_batch_size": "a batch size; penstock plan says which fits",
    "optim_target_modules": "an optimizer of torch.optim",
    "eval_on_start": "trainer.evaluate() before trainer.train()",
    "save_only_model": "False: a run goes on from the whole state",
    "enable_jit_checkpoint": "save_steps",
    "tf32": "torch.backends.cuda.matmul.allow_tf32",
    "bf16_full_eval": "bf16=True",
    "fp16_full_eval": "fp16=True",
    "full_determinism": "seed",
    "debug": "leave it out: a step whose loss is not finite raises NonFiniteLoss",
    "push_to_hub": "trainer.push_to_hub() after training",
}
LIBRARIES = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.", "transformers.optimization")  # of `optim`
LOSS = "the loss of the model itself: put yours into its forward"
OPTIMIZER = "optim and lr_scheduler_type of TrainingArguments, or optimizer_cls_and_kwargs=(class, arguments)"
PRECISIONS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}  # those of accelerate
NOT_CALLED = {
    "_get_num_items_in_batch": "leave it out: the loss is divided by what the whole batch counts",
    "compute_loss_context_manager": "the context in forward of the model",
    "autocast_smart_context_manager": "bf16 or fp16 of TrainingArguments",
    "_wrap_model": "model=, already wrapped",
    "create_optimizer_and_scheduler": OPTIMIZER,
    "_clip_grad_norm": "max_grad_norm of TrainingArguments",
    "_get_grad_norm": "leave it out: the norm is logged",
}
SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # that follow an evaluation


def refuse_arguments(args: Any) -> None:
    """Raise `PlanError` for an option of `args` that cannot be honoured."""
    for name, instead in INSTEAD.items():
        value = getattr(args, name, None)
        if value:
            raise PlanError(f"TrainingArguments({name}={value!r}) cannot be honoured by a Job; use: {instead}")
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in SCHEDULES:
        raise PlanError(f"TrainingArguments(lr_scheduler_type={kind!r}) depends on evaluations; use: 'linear'")
    if args.mixed_precision not in PRECISIONS:
        raise PlanError(
            f"accelerate launch --mixed_precision {args.mixed_precision}: use one of {', '.join(PRECISIONS)}"
        )
    if args.train_sampling_strategy == "group_by_length":
        raise PlanError("TrainingArguments(train_sampling_strategy='group_by_length'): use: 'random'")
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise PlanError(
            "TrainingArguments(average_tokens_across_devices=False): the loss of a Job is the mean over the tokens of "
            "all ranks; use: True"
        )


def overrides(trainer: Any, name: str) -> bool:
    """Whether a class of the script has a method of this name before the classes of Penstock do."""
    own = itertools.takewhile(lambda kind: not _is_ours(kind), type(trainer).__mro__)
    return any(name in vars(kind) for kind in own)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(str(__package__).partition(".integrations")[0])


def refuse_trainer(trainer: Any, own_loss: Any) -> None:
    """Raise `PlanError` for a trainer with a loss, an optimizer or a model of its own making, or a launcher's, and for
    methods of its own that a step of a Job would not call, or in which none is made."""
    kind = type(trainer)
    step = kind.training_step
    for name, instead in NOT_CALLED.items():
        if overrides(trainer, name):
            raise PlanError(f"{kind.__name__}.{name} would not be called in a step of a Job; use: {instead}")
    if overrides(trainer, "training_step") and "training_step" not in inspect.unwrap(step).__code__.co_names:
        raise PlanError(
            f"{kind.__name__}.training_step makes no step of the Job; use: super().training_step(model, inputs, "
            "num_items_in_batch) in it"
        )
    found = {
        "compute_loss_func": (trainer.compute_loss_func is not None, LOSS),
        "compute_loss": (kind.compute_loss is not own_loss, LOSS),
        "optimizers": (trainer.optimizer is not None or trainer.lr_scheduler is not None, OPTIMIZER),
        "create_optimizer": (kind.create_optimizer is not Trainer.create_optimizer, OPTIMIZER),
        "create_scheduler": (kind.create_scheduler is not Trainer.create_scheduler, OPTIMIZER),
        "model_init": (trainer.model_init is not None, "model=model_init()"),
        "accelerate launch --use_deepspeed": (trainer.is_deepspeed_enabled, "it without: the plan shards and offloads"),
        "accelerate launch --use_fsdp": (trainer.is_fsdp_enabled, "it without: the plan shards"),
    }
    for name, (is_given, instead) in found.items():
        if is_given:
            raise PlanError(f"{name} cannot be honoured by a Job; use: {instead}")


def require_known_optimizer(kind: Any, name: str) -> None:
    """Raise `PlanError` for an optimizer of `optim` that wants more than gradients from its trainer."""
    if not kind.__module__.startswith(LIBRARIES):
        raise PlanError(
            f"TrainingArguments(optim={name!r}) is {kind.__module__}.{kind.__name__}; use: 'adamw_torch', or an "
            "optimizer of torch, torchao or bitsandbytes, or 'adafactor'"
        )


def require_whole_batches(args: Any, rows: int, whole: int, steps: int, reason: str) -> None:
    """Raise `PlanError` where some step would have fewer rows than the others, and cannot be filled up."""
    used = rows // args.world_size // args.train_batch_size * args.train_batch_size * args.world_size
    used = used if args.dataloader_drop_last else rows
    if reason and used % whole and steps > used // whole:
        raise PlanError(
            f"train_dataset has {rows} rows, which do not make whole batches of {whole} (per_device_train_batch_size x "
            "gradient_accumulation_steps x ranks): every step of a Job has the same number of rows, and none can be "
            f"filled up, as {reason}; give it {rows // whole * whole}"
        )
