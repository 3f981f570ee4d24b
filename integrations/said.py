"""The lines that a script reads before its first step: what is planned, and the answer of `penstock plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from torch import Tensor

from ..compiler.job.job import Job
from ..compiler.report.answer import LABEL, answer_lines, many


def items_of(batch: Mapping[str, Tensor], rows: int) -> tuple[int, str]:
    """The number of items of a batch, and the word for one."""
    return (batch["input_ids"].numel(), "token") if "input_ids" in batch else (rows, "row")


def tell_planning(model: Any, hardware: Any, batch: Mapping[str, Tensor], rows: int) -> None:
    number, item = items_of(batch, rows)
    size = f"{many(number, item)} in {many(rows, 'row')}" if item == "token" else many(rows, item)
    machine = "this machine" if hardware == "auto" else getattr(hardware, "name", hardware)
    _print([f"planning {type(model).__name__} on {machine}: a batch of {size}"])


def tell_plan(job: Job, batch: Mapping[str, Tensor], rows: int) -> None:
    """The answer's lines that need no other plans."""
    plan = job.plan
    head = f"{plan.model} on {job.hardware.name}: {plan.precision}, plan {plan.hash}"
    stages, busiest = job.folder.interface.stages, job.simulate().bottleneck()
    _print([head, *answer_lines(job.model, plan, job.hardware, stages, items_of(batch, rows), busiest)])


def _print(lines: list[str]) -> None:
    screen = Console(markup=False, emoji=False, highlight=False, stderr=True)
    for text in lines:
        for part in textwrap.wrap(text, screen.width, subsequent_indent=" " * LABEL, break_long_words=False):
            screen.print(part, soft_wrap=True)
