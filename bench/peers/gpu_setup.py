"""Shared by the sections of `bench/gpu_first.py`: the device on which they run, and the rows that they yield."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock

GIB = 2**30
MOST_DRAM_BYTES = 100 * 10**9  # page-locking more takes minutes
Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The place of a run. `scratch` is a folder that the sections of one run share, `seconds` this section's time
    limit."""

    device: str  # "cuda" or "cpu"
    small: bool
    scratch: Path
    seconds: float = 540.0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def hardware(self, memory: str | int | None = None) -> penstock.Hardware:
        """One device, with the rates that the first section measured; `memory` limits its memory."""
        if not self.on_gpu:
            return penstock.Hardware.cpu(num_devices=1, memory=memory or "1GB", dram="4GB")
        measured = self.scratch / "hardware.yaml"
        found = penstock.Hardware.load(measured) if measured.exists() else penstock.Hardware.detect()
        found = found.with_(num_devices=1, dram=min(MOST_DRAM_BYTES, found.hosts[0].dram_bytes))
        return found if memory is None else found.with_(memory=memory)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Release the memory of earlier models, so that it is not measured."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def row_at_most(figure: str, measured: float, limit: float, **more: Any) -> Row:
    return {"figure": figure, "measured": measured, "target": f"<= {limit:.4g}", "ok": measured <= limit, **more}


def row_at_least(figure: str, measured: float, limit: float, **more: Any) -> Row:
    return {"figure": figure, "measured": measured, "target": f">= {limit:.4g}", "ok": measured >= limit, **more}


def row_between(figure: str, measured: float, low: float, high: float, **more: Any) -> Row:
    target = f"{low:.4g} to {high:.4g}"
    return {"figure": figure, "measured": measured, "target": target, "ok": low <= measured <= high, **more}


def holds(figure: str, found: bool, **more: Any) -> Row:
    return {"figure": figure, "measured": found, "target": "true", "ok": found, **more}


def note_call(figure: str, measured: Any, **more: Any) -> Row:
    """A figure without a target."""
    return {"figure": figure, "measured": measured, "target": None, "ok": None, **more}
