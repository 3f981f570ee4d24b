"""The features of a Trainer: honoured, left aside with a line, or refused by name. docs/integrations.md shows them."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Literal

from ...ir.errors import PlanError

logger = logging.getLogger(__name__)
RECOMPUTED = "the plan chooses what is computed again"
Treatment = Literal["honoured", "left aside", "refused"]


@dataclass(frozen=True)
class Feature:
    """An option of `TrainingArguments`, an argument of the trainer, a method of a subclass or a form of data. `text`:
    what happens here, the reason to leave the option aside, or what works in its place."""

    name: str
    treatment: Treatment
    text: str


FEATURES = (
    Feature("per_device_train_batch_size, gradient_accumulation_steps", "honoured", "one batch, cut by the plan"),
    Feature("bf16, fp16", "honoured", "autocast over fp32 weights, also by `accelerate launch --mixed_precision`"),
    Feature("max_grad_norm", "honoured", "the norm of the whole gradient; with 0 none is logged"),
    Feature("optim, optim_args", "honoured", "optimizers of torch, torchao and bitsandbytes, and `adafactor`"),
    Feature("weight_decay", "honoured", "in the groups of `Trainer`"),
    Feature("lr_scheduler_type, warmup_steps", "honoured", "also `reduce_lr_on_plateau` and `greedy`"),
    Feature("optimizers", "honoured", "the optimizer's class, arguments and groups; the scheduler's rates"),
    Feature("optimizer_cls_and_kwargs", "honoured", "any class that steps on gradients alone"),
    Feature("create_optimizer", "honoured", "of a subclass: as `optimizers`, with a learning rate for each group"),
    Feature("create_scheduler", "honoured", "of a subclass: as `optimizers`"),
    Feature("compute_loss", "honoured", "of a subclass: traced with the model"),
    Feature("compute_loss_func", "honoured", "traced; `num_items_in_batch` is the whole batch's"),
    Feature("label_smoothing_factor", "honoured", "traced with the model"),
    Feature("neftune_noise_alpha", "honoured", "drawn by keys, as dropout is; scaled by the padded length"),
    Feature("callbacks", "honoured", "but those that read gradients in the middle of a step"),
    Feature("compute_metrics, preprocess_logits_for_metrics", "honoured", "evaluation through the job"),
    Feature("predict_with_generate", "honoured", "by the model itself, on `args.device`"),
    Feature("eval_strategy, load_best_model_at_end", "honoured", "evaluation through the job"),
    Feature("eval_on_start", "honoured", "by the model itself, on `args.device`, before the plan is made"),
    Feature("save_strategy, save_total_limit, resume_from_checkpoint", "honoured", "the job's state is in `penstock`"),
    Feature("save_only_model", "honoured", "weights alone; nothing resumes from them"),
    Feature("push_to_hub", "honoured", "the upload of `Trainer`"),
    Feature("report_to, logging_steps", "honoured", "what `Trainer` logs"),
    Feature("seed, data_seed", "honoured", "the order of rows is that of `Trainer`; dropout draws by keys"),
    Feature("train_sampling_strategy", "honoured", "`random`, `sequential`, `group_by_length`"),
    Feature("ignore_data_skip", "honoured", "as in `Trainer`"),
    Feature("peft_config, a PeftModel", "honoured", "adapters, also over packed bases"),
    Feature("streams", "honoured", "with `max_steps`"),
    Feature("short last batches", "honoured", "filled with rows without labels, or taken as they are"),
    Feature("gradient_checkpointing", "left aside", RECOMPUTED),
    Feature("activation_checkpointing", "left aside", RECOMPUTED),
    Feature("torch_compile", "left aside", "compile_options={'compile_stages': True} compiles blocks"),
    Feature("tf32", "left aside", "products of fp32 keep fp32; bf16=True is faster"),
    Feature("auto_find_batch_size", "left aside", "the plan fits the batch that is asked for"),
    Feature("use_liger_kernel", "left aside", "chunked losses and fused kernels are the plan's"),
    Feature("torch_empty_cache_steps", "left aside", "the plan keeps memory within its budgets"),
    Feature("fsdp", "refused", "leave it out: the plan shards over the devices of hardware="),
    Feature("deepspeed", "refused", "leave it out: the plan shards and offloads over the memories of hardware="),
    Feature("parallelism_config", "refused", "leave it out: the plan chooses the parallelism"),
    Feature("optim_target_modules", "refused", "an optimizer of torch.optim"),
    Feature("enable_jit_checkpoint", "refused", "save_steps"),
    Feature("bf16_full_eval", "refused", "bf16=True"),
    Feature("fp16_full_eval", "refused", "fp16=True"),
    Feature("full_determinism", "refused", "seed"),
    Feature("debug", "refused", "leave it out: a step whose loss is not finite raises NonFiniteLoss"),
)  # fmt: skip
LEFT_ASIDE = {each.name: each.text for each in FEATURES if each.treatment == "left aside"}
INSTEAD = {each.name: each.text for each in FEATURES if each.treatment == "refused"}
OFF = {"torch_empty_cache_steps": None, "tf32": None}  # else False
LIBRARIES = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.", "transformers.optimization")  # of `optim`
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
SAMPLING = ("random", "sequential", "group_by_length")  # with the same number of rows in each batch


def settle_arguments(args: Any) -> Any:
    """`args` without the options that change no number, each left aside with a line. Raises `PlanError` for an option
    that a job cannot honour."""
    _refuse_arguments(args)
    given = {name: value for name in LEFT_ASIDE if (value := getattr(args, name, None))}
    if not given:
        return args
    args = copy.copy(args)
    for name, value in given.items():
        kind = type(args).__name__
        logger.warning("%s(%s=%r) is left aside: %s", kind, name, value, LEFT_ASIDE[name])
        setattr(args, name, OFF.get(name, False))
        for more in [each for each in vars(args) if each.startswith(f"{name}_")]:
            setattr(args, more, None)
    return args


def _refuse_arguments(args: Any) -> None:
    for name, instead in INSTEAD.items():
        value = getattr(args, name, None)
        if value:
            raise PlanError(f"TrainingArguments({name}={value!r}) cannot be honoured by a Job; use: {instead}")
    if args.mixed_precision not in PRECISIONS:
        raise PlanError(
            f"accelerate launch --mixed_precision {args.mixed_precision}: use one of {', '.join(PRECISIONS)}"
        )
    if args.train_sampling_strategy not in SAMPLING:
        raise PlanError(
            f"TrainingArguments(train_sampling_strategy={args.train_sampling_strategy!r}): its batches have several "
            f"numbers of rows; use one of {', '.join(SAMPLING)}"
        )
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


def refuse_trainer(trainer: Any) -> None:
    """Raise `PlanError` for a trainer that makes its model, or that a launcher divides, and for methods of its own that
    a step of a Job would not call, or in which none is made."""
    kind = type(trainer)
    step = kind.training_step
    for name, instead in {**NOT_CALLED, **trainer.not_called}.items():
        if overrides(trainer, name):
            raise PlanError(f"{kind.__name__}.{name} would not be called in a step of a Job; use: {instead}")
    if overrides(trainer, "training_step") and "training_step" not in inspect.unwrap(step).__code__.co_names:
        raise PlanError(
            f"{kind.__name__}.training_step makes no step of the Job; use: super().training_step(model, inputs, "
            "num_items_in_batch) in it"
        )
    found = {
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
