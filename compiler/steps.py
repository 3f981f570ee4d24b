"""The steps of a job, one right after another, and their simulation."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.machine.hardware import Hardware
from ..ir.program import Program, drain_of
from ..runtime.simulate import Timeline, simulate, simulate_steps


def simulate_here(programs: Sequence[Program], hardware: Hardware, precision: str) -> Timeline:
    """A step from rest, with the `steady_s` of steps one right after another, as a job of this process runs them."""
    alone = simulate(programs, hardware, precision=precision)
    return simulate_steps(programs, hardware, alone, drain_of(programs, precision), precision=precision)
