"""Why steps of some programs do not overlap: what only the end of a step shows, and the next one needs.

Such a step is drained: it ends before the next one begins. All other steps follow one right after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ..precision import Precision
from .memory import homes_of
from .program import Program


class Drain(Enum):
    """What a drained step waits for."""

    UNDO = "updates may be undone, and only a step's end shows whether they are"
    LOSS_SCALE = "a step's end gives the next loss scale (fp16)"


def drain_of(programs: Sequence[Program], precision: str) -> Drain | None:
    """Why steps of these programs are drained; None where the next one begins before."""
    if any(home.undo for program in programs for home in homes_of(program).values()):
        return Drain.UNDO
    return Drain.LOSS_SCALE if Precision.of(precision).scales_loss else None
