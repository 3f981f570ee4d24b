"""The same 200 steps by TRL's trainers and by Penstock's, and by ones that were resumed in the middle.

A small Llama in fp32: SFT on chats with the loss on the assistant's turns, one by one and packed; DPO of adapters,
whose reference is the base, and of all weights, with a frozen copy. Every row has the largest differences of the losses
of all steps, relative to TRL's, and of the weights afterwards.

Run: python bench/same_as_trl.py [--steps N] [--only assistant packed adapters frozen]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from penstock.bench.peers import same_run
from penstock.bench.same_as_trainer import ONE, chat_model, chat_tokenizer, chats
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


def make_case(kind: type, make: Callable[..., Any], known: dict[str, Any]) -> Any:
    given = {"hardware": ONE} if hasattr(kind, "own_loss") else {}
    return make(kind, {**known, "gradient_accumulation_steps": 2}, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        theirs, ours, make = CASES[name]
        same_run.save("same_as_trl", name, args.steps, partial(make_case, theirs, make), partial(make_case, ours, make))


if __name__ == "__main__":
    main()
