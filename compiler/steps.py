"""The steps of a job, one right after another: whether they are drained here, and their simulation."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.machine.hardware import Hardware
from ..ir.program import Drain, Program, computed_again, drain_of
from ..runtime.processes.local import runs_in_script
from ..runtime.simulate import Timeline, simulate_steps, step_seconds


def drain_here(programs: Sequence[Program], hardware: Hardware, precision: str) -> Drain | None:
    """The reason why this process's jobs drain their steps; None where they do not."""
    on_cpu = [program for program in programs if hardware.devices[program.device].kind == "cpu"]
    drawing = any(computed_again(program, draws=True) for program in on_cpu)
    return drain_of(programs, precision, drawing and runs_in_script(programs, hardware, precision))


def simulate_here(programs: Sequence[Program], hardware: Hardware, precision: str) -> Timeline:
    """A step from rest, with the `steady_s` of steps one right after another, as a job of this process runs them."""
    return simulate_steps(programs, hardware, drain_here(programs, hardware, precision), precision=precision)


def step_seconds_here(programs: Sequence[Program], hardware: Hardware, precision: str) -> float:
    """`simulate_here(...).step_s`, which is all that the search compares."""
    return step_seconds(programs, hardware, drain_here(programs, hardware, precision), precision=precision)
