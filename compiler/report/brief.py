"""The answer of `penstock plan` about a job, from the job alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ...ir.machine.hardware import Hardware
from ...runtime.simulate import Timeline
from ..folder import BatchRow
from ..plan import Plan
from .answer import answer_lines, line, many, wrap_lines

WIDTH = 118
MORE = "explain with full=True (--full): stages, memories, bounds, what would help, rivals, passes"


def brief_text(
    model: nn.Module,
    plan: Plan,
    hardware: Hardware,
    stages: Sequence[str],
    timeline: Timeline,
    batch: Sequence[BatchRow],
    full: bool,
) -> str:
    """The answer, in lines of at most `WIDTH`; without `full` the last line says where more is. `batch`: the tensors of
    a step."""
    shapes = [shape for name, shape, _ in batch if name.endswith("input_ids") and len(shape) == 2]
    rows = next((shape[0] for _, shape, _ in batch if shape), 1)
    text, items, item = many(rows, "row"), rows, "row"
    if shapes:
        items, item = sum(map(math.prod, shapes)), "token"
        text += f" of {many(items // rows, item)}"
    lines = [
        f"{plan.model} on {hardware.name}: {text}, {plan.precision}, plan {plan.hash}",
        *answer_lines(model, plan, hardware, stages, (items, item), timeline.bottleneck()),
        *([] if full else [line("more", MORE)]),
    ]
    return "\n".join(wrap_lines(lines, WIDTH))
