"""The steps of a job, one right after another: whether they are drained here, and their simulation."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.machine.hardware import Hardware
from ..ir.program import Drain, Program, drain_of
from ..runtime.processes.torchrun import TorchrunDriver
from ..runtime.simulate import Timeline, simulate, simulate_steps


def drain_here(programs: Sequence[Program], precision: str) -> Drain | None:
    """Why this process's jobs drain their steps; None where they do not."""
    return Drain.RANKS if TorchrunDriver.is_present() else drain_of(programs, precision)


def simulate_here(programs: Sequence[Program], hardware: Hardware, precision: str) -> Timeline:
    """A step from rest, with the `steady_s` of steps one right after another, as a job of this process runs them."""
    alone = simulate(programs, hardware, precision=precision)
    return simulate_steps(programs, hardware, alone, drain_here(programs, precision), precision=precision)
