"""Runs of `penstock train` on one CPU device in this process."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.options import TrainOptions
from penstock.cli.training import TrainResult, train

GPT = "gpt2:n_layer=1,n_embd=32,n_head=4,vocab_size=256,n_positions=64"
TEXT = "the quick brown fox jumps over the lazy dog and comes back again. " * 40


def options(data: Path | None, out: Path, **changes: Any) -> TrainOptions:
    given = {
        "model": GPT, "data": data and [data], "out": out, "hardware": ["cpu"], "set": ["num_devices=1"], "batch": 4,
        "sequence": 16, "micro_batches": 2, "strategy": "balanced", "lr": 1e-2, "max_steps": 6, **changes,
    }  # fmt: skip
    return TrainOptions(**given)


def run(chosen: TrainOptions) -> tuple[TrainResult, str]:
    """The result and what was said."""
    screen = Console(file=StringIO(), width=300)
    result = train(chosen, screen)
    return result, screen.file.getvalue()  # type: ignore[attr-defined]
