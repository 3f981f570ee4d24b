"""Keys in files of other trainers (Trainer, TRL, Axolotl, LLaMA-Factory, Unsloth), and ours in their place."""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {  # with the same meaning and the same values
    "base_model": "model", "model_name": "model", "model_name_or_path": "model",
    "dataset_path": "data", "train_file": "data", "validation_file": "eval_data", "dataset_split": "split",
    "cutoff_len": "sequence", "max_length": "sequence", "max_seq_len": "sequence", "max_seq_length": "sequence",
    "sequence_len": "sequence", "max_target_length": "targets",
    "packing": "pack", "sample_packing": "pack", "val_set_size": "eval_fraction", "val_size": "eval_fraction",
    "dpo_beta": "beta", "pref_beta": "beta", "rl_beta": "beta",
    "learning_rate": "lr", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule",
    "num_epochs": "epochs", "num_train_epochs": "epochs",
    "eval_steps": "eval_every", "early_stopping_patience": "patience",
    "output_dir": "out", "save_steps": "save_every",
}  # fmt: skip
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


def answer_to(key: str, section_of: Mapping[str, str]) -> str:
    """What to write in place of a key of another trainer; "" for a key that none has."""
    if key not in WRITE:
        return ""
    own, _, rest = WRITE[key].partition(":")
    return f"write {section_of[own]}.{own}:{rest}" if own in section_of else WRITE[key]
