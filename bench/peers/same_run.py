"""The same run by a trainer of others and by ours, and by one of ours that was resumed in its middle."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from . import rows

Make = Callable[[dict[str, Any]], Any]  # the arguments of a run -> its trainer


def save(bench: str, case: str, steps: int, plain: Make, ours: Make) -> None:
    """A row with the largest differences of the losses of all steps, relative to the others', and of the weights
    afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        expected, plain_s = _train(plain, steps, Path(folder, "plain"))
        found, ours_s = _train(ours, steps, Path(folder, "ours"))
        middle = str(Path(folder, "ours", f"checkpoint-{steps // 2}"))
        resumed, _ = _train(ours, steps, Path(folder, "ours"), middle)
    wanted = _losses(expected)
    row = {"case": case, "steps": steps, "first_loss": float(wanted[0]), "last_loss": float(wanted[-1])}
    for prefix, trainer in (("", found), ("resumed_", resumed)):
        row[f"{prefix}losses_apart"] = float(((_losses(trainer) - wanted).abs() / wanted.abs()).max())
        row[f"{prefix}weights_apart"] = _weights_apart(trainer.model, expected.model)
    rows.save(bench, {**row, "seconds": ours_s, "plain_seconds": plain_s})


def _train(make: Make, steps: int, folder: Path, resume: str | None = None) -> tuple[Any, float]:
    trainer = make(
        {
            "output_dir": str(folder), "max_steps": steps, "learning_rate": 1e-4, "warmup_steps": 20,
            "weight_decay": 0.01, "lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "steps",
            "save_steps": steps // 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False,
            "per_device_train_batch_size": 4,
        }
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    began_s = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    return trainer, time.perf_counter() - began_s


def _losses(trainer: Any) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], dtype=torch.float64)


def _weights_apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
