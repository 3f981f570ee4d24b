"""The same 200 steps by TRL's trainers and by Penstock's, and by ones that were resumed in the middle.

A small Llama in fp32: SFT on chats with the loss on the assistant's turns, one by one and packed; DPO of adapters,
whose reference is the base, and of all weights, with a frozen copy. Every row has the largest differences of the losses
of all steps, relative to TRL's, and of the weights afterwards.

Run: python bench/same_as_trl.py [--steps N] [--only assistant packed adapters frozen]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from penstock.bench.peers import rows
from penstock.bench.same_as_trainer import ONE, apart, chat_model, chat_tokenizer, chats, losses, weights_apart
from penstock.integrations.trl import PenstockDPOTrainer, PenstockSFTTrainer


def model(tokenizer: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return chat_model(tokenizer)


def sft(kind: type, known: dict[str, Any], given: dict[str, Any], **changes: Any) -> Any:
    tokenizer = chat_tokenizer()
    args = SFTConfig(**known, max_length=96, assistant_only_loss=True, **changes)
    data = Dataset.from_list([{"messages": messages} for messages in chats()])
    return kind(model=model(tokenizer), args=args, train_dataset=data, processing_class=tokenizer, **given)


def dpo(kind: type, known: dict[str, Any], given: dict[str, Any], **more: Any) -> Any:
    """The last answer, and the last answer of another chat."""
    tokenizer, found = chat_tokenizer(), chats()
    pairs = [
        {"prompt": a[:-1], "chosen": a[-1:], "rejected": b[-1:]}
        for a, b in zip(found, found[1:] + found[:1])
        if a[-1] != b[-1]
    ]
    data = Dataset.from_list(pairs[: len(pairs) // 8 * 8])
    changes = more.pop("changes", {})
    reference = {name: model(tokenizer, seed) for name, seed in more.pop("models", {}).items()}
    given = {**given, **more, **reference}
    args = DPOConfig(**{**known, **changes})
    return kind(model=model(tokenizer), args=args, train_dataset=data, processing_class=tokenizer, **given)


def lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")


Case = tuple[type, type, Callable[..., Any]]
CASES: dict[str, Case] = {
    "assistant": (SFTTrainer, PenstockSFTTrainer, sft),
    "packed": (SFTTrainer, PenstockSFTTrainer, lambda *a: sft(*a, packing=True)),
    "adapters": (
        DPOTrainer,
        PenstockDPOTrainer,
        lambda *a: dpo(*a, peft_config=lora(), changes={"learning_rate": 1e-3}),
    ),
    "frozen": (DPOTrainer, PenstockDPOTrainer, lambda *a: dpo(*a, models={"ref_model": 1})),
}


def run(kind: type, make: Callable[..., Any], steps: int, folder: Path, resume: str | None = None) -> Any:
    known = {
        "output_dir": str(folder), "max_steps": steps, "learning_rate": 1e-4, "warmup_steps": 20, "weight_decay": 0.01,
        "lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "steps", "save_steps": steps // 2,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "bf16": False,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    given = {"hardware": ONE} if hasattr(kind, "own_loss") else {}
    trainer = make(kind, known, given)
    trainer.remove_callback(transformers.PrinterCallback)
    began_s = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    return trainer, time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        trl, ours_kind, make = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            plain, plain_s = run(trl, make, args.steps, Path(folder, "plain"))
            ours, ours_s = run(ours_kind, make, args.steps, Path(folder, "ours"))
            middle = str(Path(folder, "ours", f"checkpoint-{args.steps // 2}"))
            resumed, _ = run(ours_kind, make, args.steps, Path(folder, "ours"), middle)
            rows.save(
                "same_as_trl",
                {
                    "case": name,
                    "steps": args.steps,
                    "first_loss": float(losses(plain)[0]),
                    "last_loss": float(losses(plain)[-1]),
                    "losses_apart": apart(losses(ours), losses(plain)),
                    "weights_apart": weights_apart(ours.model, plain.model),
                    "resumed_losses_apart": apart(losses(resumed), losses(plain)),
                    "resumed_weights_apart": weights_apart(resumed.model, plain.model),
                    "seconds": ours_s,
                    "trl_seconds": plain_s,
                },
            )


if __name__ == "__main__":
    main()
