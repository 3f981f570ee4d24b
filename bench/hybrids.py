"""Hybrids of attention and state along the sequence, tiny: five steps against eager PyTorch, by the reference code of
transformers on CPU.

A row is a family: the largest difference of losses and weights over full fine-tuning and LoRA, without padding and with
padding on the left and on the right, one and two micro-batches, one and two devices; eager trains the whole batch at
once. `sides`: how far eager's losses with padding on the left are from those with padding on the right. `packed`: the
first lines of the error for a row of two documents.

Run: python bench/hybrids.py [--only WORDS] [--tokens 16] [--cases 8] [--save]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import re
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.bench.model_zoo.compare import TOLERANCE, build, differences, double_differences, train, train_plan
from penstock.bench.model_zoo.registry import ModelClass
from penstock.bench.peers import rows
from penstock.compiler.models.adapters import ALL_LINEAR, LoraChoice
from penstock.errors import PenstockError

FAMILIES = (
    "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp", "KimiLinear", "OlmoHybrid", "LaraMini", "BailingHybrid",
    "NemotronH", "FalconH1", "GraniteMoeHybrid", "Bamba", "Zamba", "Zamba2", "Jamba", "Mamba", "FalconMamba", "Mamba2",
    "Lfm2", "Lfm2Moe", "Lfm3", "Inkling", "Inkling2", "Inkling2Loop", "MiniMax", "Rwkv", "RecurrentGemma",
)  # fmt: skip
STEPS, ROWS, PADDING = 5, 4, 3
FEW, MOST_CASES = (("full", "left"), ("lora", "right")), 24
Batch = dict[str, Tensor]


def model_class(family: str) -> ModelClass:
    return ModelClass(f"{family}ForCausalLM", family.lower(), "causal_lm")


def token_batch(tokens: int, side: str) -> Batch:
    """Rows of tokens, of which all but the first have padding on a side: "none", "left" or "right"."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 90, (ROWS, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[1:, -PADDING:] = 0
        ids = ids.masked_fill(mask == 0, 0)
    if side == "left":
        ids, mask = (torch.cat([part[:1], part[1:].roll(PADDING, 1)]) for part in (ids, mask))
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)  # no token of padding foretells the first one of a text
    batch = {"input_ids": ids, "labels": labels}
    return batch if side == "none" else {**batch, "attention_mask": mask}


def packed_batch(tokens: int) -> Batch:
    """Rows of two documents each, as `penstock.pack_documents` makes them."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(4, 90, (tokens // 2,), generator=generator) for _ in range(2 * ROWS)]
    return penstock.pack_documents(documents, 2 * (tokens // 2)).columns


def add_adapters(model: nn.Module) -> nn.Module:
    """LoRA on every linear layer but the head, with small numbers in place of zeros, so that both factors learn."""
    torch.manual_seed(1)
    adapted = LoraChoice(r=4, targets=(ALL_LINEAR,)).put_on(model, "causal-lm")
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    return adapted


def largest(apart: dict[str, Any]) -> float:
    """The largest difference of a loss, or of a weight relative to the largest of its tensor."""
    return max(apart["loss_apart"], apart["weights_apart"])


def compare(family: str, tokens: int, num_cases: int = MOST_CASES) -> dict[str, Any]:
    """The row of a family."""
    found: dict[str, Any] = {"family": family, "tokens": tokens, "cases": num_cases}
    try:
        start = build(model_class(family))
        first = {side: train(copy.deepcopy(start), token_batch(tokens, side), STEPS) for side in ("left", "right")}
    except Exception as error:
        return {**found, "outcome": "fails in eager", "detail": _text(error)}
    found["sides"] = max(abs(a - b) / abs(b) for a, b in zip(first["left"]["losses"], first["right"]["losses"]))
    found.update(compare_cases(start, lambda side: token_batch(tokens, side), num_cases))
    return {**found, "packed": packed_outcome(start, tokens)} if "apart" in found else found


def compare_cases(start: nn.Module, batch_of: Callable[[str], Batch], num_cases: int) -> dict[str, Any]:
    """The largest difference of all cases, or the first that is refused. `batch_of`: by the side of its padding."""
    found: dict[str, Any] = {}
    cases = itertools.product(("full", "lora"), ("none", "left", "right"), (1, 2), (1, 2))
    worst, began = 0.0, time.monotonic()
    for kind, side, micro_batches, devices in cases:
        if num_cases < MOST_CASES and (kind, side) not in FEW:
            continue
        if num_cases == len(FEW) and 1 in (micro_batches, devices):
            continue
        case = f"{kind} {side} M={micro_batches} devices={devices}"
        model = copy.deepcopy(start)
        model = add_adapters(model) if kind == "lora" else model
        batch = batch_of(side)
        try:
            wanted = train(copy.deepcopy(model), batch, STEPS)
        except Exception as error:
            return {"outcome": "fails in eager", "case": case, "detail": _text(error)}
        try:
            planned = train_plan(copy.deepcopy(model), batch, micro_batches, devices, STEPS)
        except PenstockError as error:
            return {"outcome": "refused", "case": case, "detail": _text(error)}
        except Exception as error:
            return {"outcome": "raw error", "case": case, "detail": _text(error)}
        apart = differences(model, wanted, planned)
        if not largest(apart) <= TOLERANCE:
            apart = double_differences(model, batch, apart, micro_batches, devices, STEPS)
            found["rounding"] = f"{case}: {apart['detail']}"
        value = largest(apart)
        if not value <= worst:
            worst, found["worst_case"] = value, case
    outcome = "equal" if worst <= TOLERANCE else "different"
    return {**found, "apart": worst, "outcome": outcome, "seconds": time.monotonic() - began}


def packed_outcome(model: nn.Module, tokens: int) -> str:
    try:
        train_plan(copy.deepcopy(model), packed_batch(tokens), 2, 1, STEPS)
    except PenstockError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raw error: {_text(error)}"
    return "trained"


def _text(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    args = arguments(parser)
    for family in FAMILIES:
        if re.search(args.only, family):
            show("hybrids", compare(family, args.tokens, args.cases), args.save)


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a comparison of families, whose libraries are quiet from now on."""
    parser.add_argument("--only", default="", help="an expression found in the names of families")
    parser.add_argument(
        "--cases", type=int, choices=(2, 8, MOST_CASES), default=MOST_CASES,
        help="8: padding on the left in full, on the right with LoRA; 2: of these, two micro-batches on two devices",
    )  # fmt: skip
    parser.add_argument("--save", action="store_true")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return parser.parse_args()


def show(bench: str, row: dict[str, Any], is_kept: bool) -> None:
    if is_kept:
        rows.save(bench, row)
    else:
        print(row, flush=True)


if __name__ == "__main__":
    main()
