"""The reasons for which steps of a program do not overlap: values known only at the end of a step that the next one
needs.

Such a step is drained: it ends before the next one begins. All other steps follow one right after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .. import ops
from ..precision import Precision
from .memory import homes_of
from .program import Program


class Drain(Enum):
    """The condition that a drained step waits for."""

    UNDO = "updates may be undone, and only a step's end shows whether they are"
    LOSS_SCALE = "a step's end gives the next loss scale (fp16)"
    DRAWS = (
        "a CPU device in the script's own process computes stages again that draw random numbers, from generators that "
        "the script draws from, too"
    )


def drain_of(programs: Sequence[Program], precision: str, in_script: bool = False) -> Drain | None:
    """The reason to drain steps of these programs; None where the next step begins before. `in_script`: whether CPU
    devices compute in the script's own process."""
    if in_script and any(computed_again(program, draws=True) for program in programs):
        return Drain.DRAWS
    if any(home.undo for program in programs for home in homes_of(program).values()):
        return Drain.UNDO
    return Drain.LOSS_SCALE if Precision.of(precision).scales_loss else None


def computed_again(program: Program, draws: bool = False) -> set[str]:
    """The stages whose forward runs a second time for a backward; `draws`: only those that draw random numbers."""
    forwards = (node for node in program.ops() if node.target is ops.forward)
    again = {str(node.args[0]) for node in forwards if node.kwargs.get("keep", True) is not True}
    return {stage for stage in again if program.interface.stages[stage].draws or not draws}
