"""Vision-language models, tiny: five steps against eager PyTorch, with images in every row and values of the batch that
forward reads.

A row is a family: the largest difference of losses and weights over full fine-tuning and LoRA in the tower and the
language model, without padding and with padding on the left and on the right, one and two micro-batches, one and two
devices; eager trains the whole batch at once.

Run: python bench/vision.py [--only WORDS] [--cases 8] [--save]
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from penstock.bench.hybrids import PADDING, Batch, arguments, compare_cases, show
from penstock.bench.model_zoo.compare import FailsInEager, train_first
from penstock.bench.model_zoo.registry import ModelClass

FAMILIES = (
    "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Gemma3", "Gemma4", "Llava", "LlavaNext", "LlavaOnevision",
    "Mistral3", "SmolVLM", "Idefics3", "Glm4v", "InternVL", "Kosmos2", "Llama4", "PaliGemma", "AyaVision",
)  # fmt: skip


def model_class(family: str) -> ModelClass:
    return ModelClass(f"{family}ForConditionalGeneration", family.lower(), "image_text_to_text")


def put_padding(batch: Batch, side: str) -> Batch:
    """The batch with its padding on a side, or with tokens in place of it."""
    batch = {name: value.clone() for name, value in batch.items()}
    if side == "none":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    if side == "left":
        like = batch["input_ids"].shape
        for name, value in batch.items():
            if value.shape == like:
                batch[name][-1] = value[-1].roll(PADDING)
        batch["labels"][:, 1:].masked_fill_(batch["attention_mask"][:, :-1] == 0, -100)
    return batch


def compare(family: str, num_cases: int) -> dict[str, Any]:
    """The row of a family."""
    found: dict[str, Any] = {"family": family, "cases": num_cases}
    try:
        start, batch, _ = train_first(model_class(family))
    except FailsInEager as error:
        return {**found, "outcome": "fails in eager", "detail": str(error)}
    return {**found, **compare_cases(start, lambda side: put_padding(batch, side), num_cases)}


def main() -> None:
    args = arguments(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    for family in FAMILIES:
        if re.search(args.only, family):
            show("vision", compare(family, args.cases), args.save)


if __name__ == "__main__":
    main()
