"""The lines that a script prints before its first step: what is planned, and the answer of `penstock plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..compiler.job.job import Job
from ..compiler.report.answer import many


def tell_planning(model: Any, hardware: Any, batch: Mapping[str, Tensor], rows: int) -> None:
    size = many(rows, "row")
    if "input_ids" in batch:
        size = f"{many(batch['input_ids'].numel(), 'token')} in {size}"
    machine = "this machine" if hardware == "auto" else getattr(hardware, "name", hardware)
    print(f"planning {type(model).__name__} on {machine}: a batch of {size}", file=sys.stderr)


def tell_plan(job: Job) -> None:
    print(job.explain(), file=sys.stderr)
