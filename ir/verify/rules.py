"""The verifier: proves that programs keep the invariants every runtime relies on, or says where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import VerifyError
from ..machine.hardware import Hardware
from ..program import Program
from .asynchronous import check_updates, check_versions
from .case import Case
from .devices import (
    check_collectives,
    check_deadlock,
    check_device_memory,
    check_devices,
    check_host_memory,
    check_messages,
)
from .shares import check_meetings, smaller_lanes
from .ssd import check_redo, check_states, check_written
from .training import check_coverage, check_gradients, check_legality, check_micro_batches
from .values import check_lifetimes, check_structure, check_types

# In this order: each rule may rely on those before it.
RULES: tuple[Callable[[Case], None], ...] = (
    check_devices,
    check_structure,
    check_types,
    check_lifetimes,
    check_legality,
    check_messages,
    check_collectives,
    check_device_memory,
    check_host_memory,
    check_deadlock,
    check_coverage,
    check_micro_batches,
    check_gradients,
    check_updates,
    check_versions,
    check_states,
    check_redo,
    check_written,
)


def verify(programs: Sequence[Program], hardware: Hardware | None = None, *, memory: bool = True) -> None:
    """Check the programs of all devices of one plan, in device order.

    With `hardware` and `memory`, also check that every memory's budget is kept and that no op waits for ever for it.
    Raises VerifyError with the device, the line and the program text around it, for the first rule that is broken.
    """
    if not programs:
        raise VerifyError("there are no programs to verify")
    case = Case(programs, hardware if memory else None)
    for rule in RULES:
        rule(case)
    for smaller in smaller_lanes(programs):
        verify(smaller, hardware, memory=memory)
        check_meetings(programs, smaller)
