"""A run as one file of YAML: the options of `penstock train` in sections, checked before anything is done.

Options are the only place of names, types, defaults and help (`TrainOptions`); the file's models are made of
them.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ..ir.documents import Unreadable, read_yaml
from ..ir.errors import PlanError
from .options import TrainOptions

SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("model", "head", "labels", "dropout", "download", "adapter", "base", "merge", "beta"),
    "data": (
        "data", "kind", "column", "split", "sequence", "targets", "long_rows", "pack", "image_size", "streaming",
        "eval_fraction", "eval_data",
    ),
    "hardware": ("hardware", "set", "dram", "ssd", "ssd_dir", "ssd_verify", "timeout"),
    "plan": (
        "strategy", "micro_batches", "search_seconds", "plan", "profile", "profile_cache", "precision",
        "gradient_dtype", "boundary_dtype", "kernels", "compile_stages", "cuda_graphs",
    ),
    "optimizer": (
        "optimizer", "lr", "weight_decay", "no_decay", "max_grad_norm", "schedule", "warmup_steps", "warmup_ratio",
    ),
    "training": ("batch", "epochs", "max_steps", "seed", "eval_every", "best_by", "patience"),
    "logging": ("log", "serve"),
    "saving": ("out", "save_every", "save_total_limit", "save_on_stop", "resume", "elastic", "offered", "gguf"),
}  # fmt: skip
SECTION_OF = {key: section for section, keys in SECTIONS.items() for key in keys}
FILE = "config.yaml"
# Keys of other trainers (Trainer, TRL, Axolotl, LLaMA-Factory, Unsloth), and ours in their place.
SAME: Mapping[str, str] = {  # theirs -> ours, with the same meaning and the same values
    their: own
    for own, theirs in {
        "model": "base_model model_name model_name_or_path",
        "data": "dataset_path train_file",
        "eval_data": "validation_file",
        "split": "dataset_split",
        "sequence": "cutoff_len max_length max_seq_len max_seq_length sequence_len",
        "targets": "max_target_length",
        "pack": "packing sample_packing",
        "eval_fraction": "val_set_size val_size",
        "beta": "dpo_beta pref_beta rl_beta",
        "lr": "learning_rate",
        "schedule": "lr_scheduler lr_scheduler_type",
        "epochs": "num_epochs num_train_epochs",
        "eval_every": "eval_steps",
        "patience": "early_stopping_patience",
        "out": "output_dir",
        "save_every": "save_steps",
    }.items()
    for their in theirs.split()
}
BATCH = "batch: N, the rows of all devices and micro-batches of a step together; the plan divides them"
ADAPTER = "adapter: lora:r=16,alpha=32,targets=q_proj+v_proj"
PLANNED = "leave it out: the plan decides this"
DATA = "data: FILE or OWNER/NAME; its columns say the kind, or `kind: chat`"
WRITE: Mapping[str, str] = {  # what to write instead
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size", "train_batch_size"), BATCH
    ),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size"), "leave it out: evaluations take `batch`"),
    **dict.fromkeys(("datasets", "dataset", "dataset_name", "dataset_dir", "dataset_text_field"), DATA),
    **dict.fromkeys(("test_datasets", "eval_dataset"), "eval_data: FILE"),
    **dict.fromkeys(
        ("lora_r", "lora_rank", "lora_alpha", "lora_target", "lora_target_modules", "lora_target_linear", "use_dora",
         "lora_dropout", "use_rslora", "use_lora", "use_peft", "peft", "finetuning_type", "target_modules"), ADAPTER,
    ),
    "load_in_4bit": "base: nf4", "quantization_bit": "base: nf4, or int8", "load_in_8bit": "base: int8",
    "bf16": "precision: bf16-mixed", "fp16": "precision: fp16-mixed", "fp8": "precision: fp8-rowwise",
    "torch_dtype": "precision: bf16-true", "dtype": "precision: bf16-true",
    "optim": "optimizer: adamw, or another class of torch.optim",
    "report_to": "log: [tensorboard] or [wandb]", "use_wandb": "log: [wandb]", "wandb_project": "log: [wandb]",
    "use_tensorboard": "log: [tensorboard]",
    "logging_steps": "leave it out: every step is logged",
    "resume_from_checkpoint": "resume: true, which goes on from the checkpoint in `out`",
    "load_best_model_at_end": "eval_every: N, which keeps the best model in OUT/best",
    "metric_for_best_model": "best_by: loss, or accuracy",
    "evaluation_strategy": "eval_every: N", "eval_strategy": "eval_every: N", "save_strategy": "save_every: N",
    "evals_per_epoch": "eval_every: N", "saves_per_epoch": "save_every: N",
    "data_seed": "seed: N", "max_samples": "max_steps: N",
    "train_on_inputs": "leave it out: the loss is on answers alone; `kind: text` has it on all tokens",
    "completion_only_loss": "leave it out: the loss is on answers alone",
    "assistant_only_loss": "leave it out: the loss is on the assistant's turns alone",
    "group_by_length": "pack: true, where rows should have no padding",
    "stage": "kind: chat, or preference", "rl": "kind: preference", "do_train": "leave it out: this command trains",
    "chat_template": "leave it out: the tokenizer in the model's directory has it",
    "template": "leave it out: the tokenizer in the model's directory has it",
    "tokenizer_name_or_path": "model: a directory that has the tokenizer, too",
    "streaming_dataset": "streaming: true",
    "config": "leave it out: a file is an argument, `penstock train FILE.yaml`",
    **dict.fromkeys(("gpu", "gpus", "gpu_name", "num_gpus", "card", "machine"), "hardware: 4090, or 2x4090"),
    "batch_size": BATCH, "lora": ADAPTER, "quantization": "base: nf4, or int8", "ram": "dram: 64GB",
    **dict.fromkeys(
        ("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_gradient_checkpointing", "deepspeed", "fsdp",
         "fsdp_config", "flash_attention", "flash_attn", "attn_implementation", "ddp_find_unused_parameters",
         "torch_compile", "use_liger_kernel", "auto_find_batch_size", "device_map", "low_cpu_mem_usage",
         "sample_packing_sequence_len", "pad_to_sequence_len", "use_cache", "dataloader_drop_last"), PLANNED,
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy"), "leave it out: `hf upload NAME OUT/model` does it afterwards"
    ),
}  # fmt: skip
LineNumbers = Mapping[tuple[str, ...], int]  # a section, or a section and a key -> its line
WIDTH = 118


@dataclasses.dataclass(frozen=True)
class _Key:
    """The description of an option. `least` and `most`: of its value, where it has such bounds."""

    kind: Any
    default: Any
    help: str
    least: float | None
    most: float | None

    @property
    def allowed_text(self) -> str:
        bounds = [f"{word} {bound:g}" for word, bound in (("at least", self.least), ("at most", self.most))
                  if bound is not None]  # fmt: skip
        kind = getattr(self.kind, "__name__", str(self.kind)).replace("pathlib.", "").replace("None", "null")
        return f"{', '.join([kind, *bounds])} ({self.help})"


@cache
def _keys() -> dict[str, _Key]:
    """For each option what it says of itself."""
    hints = get_type_hints(TrainOptions, include_extras=True)
    found = {}
    for field in dataclasses.fields(TrainOptions):
        kind, option = get_args(hints[field.name])
        found[field.name] = _Key(kind, field.default, option.help, option.min, option.max)
    return found


@cache
def _models() -> dict[str, type[BaseModel]]:
    """For each section the model of its keys."""
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)  # `ssd: 0` and `hardware: 4090` are texts
    found = {}
    for section, names in SECTIONS.items():
        keys = {name: _keys()[name] for name in names}
        given: dict[str, Any] = {name: (key.kind, Field(key.default, ge=key.least, le=key.most))
                                 for name, key in keys.items()}  # fmt: skip
        found[section] = create_model(section, __config__=config, **given)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The options that a file sets. Raises `PlanError` naming the line, the key, what was found and what is allowed."""
    try:
        document = read_yaml(path)
    except Unreadable as error:
        raise PlanError(f"{path}: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise PlanError(f"{path}: found a {type(document).__name__}, allowed: the sections {', '.join(SECTIONS)}")
    lines = _lines(path)
    found: dict[str, Any] = {}
    problems: list[str] = []

    def take(section: str, values: Mapping[str, Any], line: LineNumbers) -> None:
        more = _check_model(path, section, values, line)
        twice = sorted(found.keys() & more.keys())
        if twice:
            where = _line_text(line, section, twice[0])
            problems.append(f"{path}{where}: {section}.{twice[0]} is given twice, once by another trainer's name")
        found.update(more)

    def understand(key: str, value: Any, *place: str) -> bool:
        """Whether it is a key of another trainer: taken as ours, or answered with ours."""
        own = SAME.get(key)
        if own is not None:
            take(SECTION_OF[own], {own: value}, {(SECTION_OF[own], own): lines[(*place, key)]})
        elif answer := answer_to(key):
            problems.append(f"{path}{_line_text(lines, *place, key)}: {key!r} is of another trainer: {answer}")
        return own is not None or bool(answer)

    for section, values in document.items():
        if section not in SECTIONS:
            if not understand(str(section), values):
                nearest = _nearest(str(section), SECTIONS)
                problems.append(f"{path}{_line_text(lines, section)}: no section {section!r}{nearest}")
        elif isinstance(values, Mapping):
            for key, value in values.items():
                if key not in SECTIONS[section] and not understand(str(key), value, section):
                    problems.append(f"{path}{_line_text(lines, section, key)}: {_unknown(section, str(key))}")
            take(section, {key: value for key, value in values.items() if key in SECTIONS[section]}, lines)
        elif values is not None:
            problems.append(
                f"{path}{_line_text(lines, section)}: {section} is {values!r}, allowed: keys with values below it, "
                f"such as `{_example(section, values)}`"
            )
    if problems:
        raise PlanError("\n".join(problems))
    return found


def _example(section: str, values: Any) -> str:
    """A section with a value on one line: the given one below the key of the section's name, where there is one."""
    key = section if section in SECTIONS[section] else SECTIONS[section][0]
    return f"{section}: {{{key}: {_value(values if key == section else _keys()[key].default)}}}"


def answer_to(key: str) -> str:
    """The text for a key of another trainer: ours that does the same. "" for a key that none has."""
    if key not in WRITE:
        return ""
    own, _, rest = WRITE[key].partition(":")
    return f"write {SECTION_OF[own]}.{own}:{rest}" if own in SECTION_OF else WRITE[key]


def _check_model(path: Path, section: str, values: Mapping[str, Any], lines: LineNumbers) -> dict[str, Any]:
    try:
        model = _models()[section].model_validate(_wrap_in_lists(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = f"{path}{_line_text(lines, section, key)}"
        raise PlanError(f"{where}: {section}.{key} is {values[key]!r}, allowed: {_keys()[key].allowed_text}") from error
    return {key: _expand_home(getattr(model, key)) for key in values}


def _wrap_in_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """One value where an option may be repeated is a list of one."""
    return {
        key: [value] if "list[" in str(_keys()[key].kind) and isinstance(value, (str, int, float)) else value
        for key, value in values.items()
    }


def _expand_home(value: Any) -> Any:
    """The value, with its paths' ~ replaced, as a shell does on the command line."""
    if isinstance(value, list):
        return [_expand_home(each) for each in value]
    return type(value)(os.path.expanduser(value)) if isinstance(value, (str, Path)) else value


def _unknown(section: str, key: str) -> str:
    if key in SECTION_OF:
        return f"{key!r} belongs to the section {SECTION_OF[key]}, not to {section}"
    own = difflib.get_close_matches(key, SECTIONS[section], 1, 0.6)
    near = own or difflib.get_close_matches(key, SECTION_OF, 1, 0.6)
    if near:
        return f"{section} has no key {key!r}; the nearest is {SECTION_OF[near[0]]}.{near[0]}"
    return f"{section} has no key {key!r}; there are {', '.join(SECTIONS[section])}"


def option_of_others(word: str) -> str:
    """Our words for an option of other trainers on the command line; "" for an unknown word."""
    key = word.lstrip("-").partition("=")[0].replace("-", "_")
    own = f"{SAME[key]}: ..." if key in SAME else WRITE.get(key, "")
    name, _, rest = own.partition(":")
    return f"--{name.replace('_', '-')}{rest}" if name in SECTION_OF else own


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    if name in SECTION_OF:
        return f"; {name!r} is a key of the section {SECTION_OF[name]}"
    return f"; the nearest is {near[0]}" if near else f"; there are {', '.join(known)}"


def _lines(path: Path) -> LineNumbers:
    """The line of each section and key."""
    found: dict[tuple[str, ...], int] = {}
    root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    for section, body in root.value if isinstance(root, yaml.MappingNode) else ():
        found[(section.value,)] = section.start_mark.line + 1
        for key, _ in body.value if isinstance(body, yaml.MappingNode) else ():
            found[section.value, key.value] = key.start_mark.line + 1
    return found


def _line_text(lines: LineNumbers, *keys: Any) -> str:
    line = lines.get(tuple(map(str, keys)))
    return f", line {line}" if line else ""


def config_text(options: TrainOptions) -> str:
    """The whole file of these options, with what each key means; `read_config` gives the same options."""
    parts = []
    for section, keys in SECTIONS.items():
        parts.append(f"{section}:")
        for key in keys:
            parts += textwrap.wrap(_keys()[key].help, WIDTH, initial_indent="  # ", subsequent_indent="  # ")
            parts.append(f"  {key}: {_value(getattr(options, key))}")
        parts.append("")
    return "\n".join(parts)


def _value(value: Any) -> str:
    plain = [str(v) for v in value] if isinstance(value, list) else str(value) if isinstance(value, Path) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, allow_unicode=True).strip()
    return text.removesuffix("...").strip()
