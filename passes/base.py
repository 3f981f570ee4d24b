"""What every pass is, and what they hand on to each other.

A pass is a small frozen dataclass: `plan` reads a `Draft` and returns one decision (plain data, a field of the saved
plan), `rewrite` applies a decision to the draft. Contracts (`needs`, `gives`) are checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..runtime.errors import PassError
from ..runtime.hardware import Hardware
from ..runtime.program import Program
from .blocks import Block
from .opgraph import OpGraph
from .stages import Stage

# Measures blocks on the devices of the machine at hand: the same blocks, with seconds by device name.
Profiler = Callable[[OpGraph, list[Block], Hardware], list[Block]]


StateBytes = Callable[[str, tuple[int, ...]], int]  # of the optimizer, for a parameter by name and shape


@dataclass(frozen=True)
class Options:
    """What the user asked for, besides model and hardware. Amounts are per global batch unless said otherwise."""

    micro_batches: int = 1
    precision: str = "fp32"
    max_grad_norm: float | None = None
    state_bytes_per_param: float = 8.0
    state_bytes_of: StateBytes | None = None  # where it depends on a parameter's shape
    stages: int | None = None  # number of stages; None: as many as devices
    profiler: Profiler | None = None  # None: times come from the roofline


@dataclass(frozen=True)
class Sharding:
    """How stages are spread over the lanes that share them.

    `tier`: the memory of the shards, "device", "dram", or "ssd" where `insert-ssd` moves them on; `ahead`: gathered so
    many phases before their use; `held`: stages that are gathered once and stay whole for all micro-batches;
    `hierarchical`: gathered between hosts first, then inside them.
    """

    tier: str = "dram"
    ahead: int = 1
    hierarchical: bool = False
    held: tuple[str, ...] = ()


@dataclass
class Draft:
    """A compilation under way. Fields fill from top to bottom; `programs` exist from the schedule on.

    With `lanes`, everything is about one of them: `hardware` is its part of the `whole` machine.
    """

    graph: OpGraph
    hardware: Hardware
    options: Options = field(default_factory=Options)
    blocks: list[Block] = field(default_factory=list)
    partition: list[list[str]] = field(default_factory=list)  # stage -> names of its blocks
    stages: list[Stage] = field(default_factory=list)
    planned_for: list[int] = field(default_factory=list)  # stage -> the device whose speed and memory it was cut for
    devices: list[int] = field(default_factory=list)  # stage -> device
    programs: list[Program] = field(default_factory=list)
    on_ssd: dict[str, str] = field(default_factory=dict)  # stage -> what of it is there: "states" or "all"
    lanes: list[list[int]] = field(default_factory=list)  # copies of the computation -> their devices; empty: one
    shards: int = 1  # lanes that share each stage's weights
    sharding: Sharding | None = None
    to_come: tuple[str, ...] = ()  # the passes behind this one, where a pass must know
    machine: Hardware | None = None  # with lanes: all of it
    notes: dict[str, str] = field(default_factory=dict)  # pass -> a remark: a proven gap, a solver that failed

    @property
    def whole(self) -> Hardware:
        """The machine with all its lanes."""
        return self.machine or self.hardware

    def stage_of(self, name: str) -> Stage:
        return next(s for s in self.stages if s.spec.name == name)

    def stages_on(self, device: int) -> list[Stage]:
        return [stage for stage, d in zip(self.stages, self.devices) if d == device]


@dataclass(frozen=True)
class Pass:
    """Base of all passes. `decides` is the field of the plan that holds the pass's decision; a pass that decides
    several things at once names them in `fields`, and its decision is a dict of them."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    decides: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[bool] = False  # whether a job can do without its decision
    automatic: ClassVar[tuple[str, ...]] = ()  # numbers among its options that it chooses itself: 0, written "auto"
    synchronous: ClassVar[bool] = True  # False: it changes the training, so that only who names it gets it
    final: ClassVar[str] = ""  # why none of its decisions may be made by another pass, where it makes several

    def plan(self, draft: Draft) -> Any:
        raise NotImplementedError

    def rewrite(self, draft: Draft, decision: Any) -> None:
        raise NotImplementedError

    def split(self, decision: Any) -> dict[str, Any]:
        """The decision by field of the plan."""
        return {name: decision[name] for name in self.fields} if self.fields else {self.decides: decision}

    def gather(self, decided: Mapping[str, Any] | None) -> Any:
        """The decision out of a plan's fields; None where the plan has none."""
        names = self.fields or (self.decides,)
        if decided is None or any(decided.get(name) is None for name in names):
            return None
        return {name: decided[name] for name in names} if self.fields else decided[self.decides]


def require_own(p: Pass, field_name: str, decision: object, own: object) -> None:
    """Raise `PassError` where a plan's decision is one that another pass makes."""
    if decision != own:
        raise PassError(f"{field_name} is {decision!r}, but {p.name} makes {own!r} only; name the other's pass")


def check_contracts(passes: Sequence[Pass]) -> None:
    """Raise `PassError` where a pass needs what no earlier pass gives, a pass comes twice, or two decide the same."""
    given: set[str] = set()
    decided: dict[str, Pass] = {}
    seen: set[str] = set()
    for p in passes:
        missing = [need for need in p.needs if need not in given]
        if missing:
            givers = [q.name for q in passes if set(missing) & set(q.gives)]
            hint = f"; put {', '.join(givers)} before it" if givers else ""
            raise PassError(f"pass {p.name!r} needs {', '.join(missing)}, which no pass before it gives{hint}")
        if p.name in seen:
            raise PassError(f"pass {p.name!r} comes twice")
        for name in p.fields or (p.decides,):
            other = decided.setdefault(name, p)
            if other is not p:
                why = p.final or other.final
                raise PassError(
                    f"pass {p.name!r} decides {name}, as {other.name} does; leave one out{f': {why}' if why else ''}"
                )
        seen.add(p.name)
        given.update(p.gives)
