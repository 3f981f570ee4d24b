"""`overlap-optimizer`: stages are stepped on the CPU under the backward of others, with states from SSD or in DRAM.

In: programs whose results hold every stage's gradients, and what `insert-ssd` put on SSD. Out: programs that update the
weights (Fuyou 4.3). A stage's states are read while stages before it run backward, its gradients are offloaded right
after its last backward and never written to SSD, it is stepped after the offload of the next stage, and written back
while the next is stepped. DRAM decides the number of buffers of states, and whether two stages' gradients lie there.

Clipping, and the loss scale of fp16, need the norm of all gradients. `exact` steps everything after the norm, with
reads, steps and writes still overlapping. `speculative` steps as if nothing had to be clipped and undoes that where the
norm says otherwise (SuperOffload: step, validate, roll back). Both keep all gradients in DRAM until the norm is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, profile_memory, work_of
from ...ir.units import format_bytes
from ...runtime.simulate import simulate
from ..base import Pass
from ..draft import Draft
from .dram_room import choose_timings
from .insert_optimizer import require_where, stepped_where
from .timing import Timing, Updates, updates_of
from .updates import write_updates

WORTH = 1.01  # speculation that is faster by less is not worth what a clipped step costs
CLIPS = ("auto", "exact", "speculative")
TIMINGS = (Timing(1, 3), Timing(1, 2), Timing(0, 2), Timing(1, 1), Timing(0, 1))  # gradients are smaller than states


@dataclass(frozen=True)
class OverlapOptimizer(Pass):
    """`overlap`: false steps everything after the last backward, for comparison. `clip`: see above; auto takes the
    faster of those that fit."""

    name: ClassVar[str] = "overlap-optimizer"
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers")
    gives: ClassVar[tuple[str, ...]] = ("optimizer",)
    decides: ClassVar[str] = "optimizer"
    fields: ClassVar[tuple[str, ...]] = ("optimizer", "clipping")
    overlap: bool = True
    clip: str = "auto"

    def __post_init__(self) -> None:
        if self.clip not in CLIPS:
            raise PassError(f"pass {self.name!r}: option clip={self.clip!r} is none of {', '.join(CLIPS)}")
        if self.clip == "speculative" and not self.overlap:
            raise PassError(
                f"pass {self.name!r}: clip=speculative steps before the norm is known, so not overlap=false"
            )

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`optimizer`: the memory of each stage's states; `clipping`: "exact", "speculative", or "" where the norm is
        not needed."""
        where = stepped_where(draft)
        return {"optimizer": where, "clipping": self._clipping(draft, self._updates(draft, where))}

    def rewrite(self, draft: Draft, decision: dict[str, Any]) -> None:
        where, clipping = decision["optimizer"], decision["clipping"]
        require_where(where, stepped_where(draft))
        updates = self._updates(draft, where)
        allowed = ("",) if updates.max_norm is None else CLIPS[1:] if self.overlap else CLIPS[1:2]
        if clipping not in allowed:
            named = " or ".join(repr(name) for name in allowed)
            raise PassError(f"clipping is {clipping!r}; with these options it is {named}")
        updates = replace(updates, speculative=clipping == "speculative")
        write_updates(draft.programs, updates, choose_timings(draft, updates, TIMINGS))
        said = [draft.notes[self.name]] if self.name in draft.notes else []
        written = sum(written_bytes(program) for program in draft.programs)
        if written:
            draft.notes[self.name] = "; ".join([*said, f"{format_bytes(written)} are written to SSD in a step"])

    def _updates(self, draft: Draft, where: dict[str, str]) -> Updates:
        return replace(updates_of(draft, where), overlap=self.overlap)

    def _clipping(self, draft: Draft, updates: Updates) -> str:
        """The faster way to clip that fits; the draft's notes say what either takes."""
        if updates.max_norm is None:
            return ""
        early = replace(updates, speculative=True)
        if self.clip == "speculative":
            return self.clip
        if self.clip == "exact" or not self.overlap or not self._early(early):
            return "exact"
        ways = {"exact": updates, "speculative": early}
        took_s = {name: predicted_s(draft, way) for name, way in ways.items()}
        fitting = {name: seconds for name, seconds in took_s.items() if seconds is not None}
        best = min(fitting, key=lambda name: fitting[name] * (1 if name == "exact" else WORTH), default="exact")
        said = [f"{name} clipping " + _takes(seconds) for name, seconds in took_s.items()]
        redo = f"a step that is clipped takes {redo_s(draft, early):.4g} s more where that was speculative"
        draft.notes[self.name] = "; ".join([f"clips {best}", *said, redo])
        return best

    def _early(self, updates: Updates) -> list[str]:
        """The stages that can be stepped before the norm is known."""
        return [s for s, memory in updates.where.items() if memory != ops.DEVICE and not updates.is_late(s)]


def predicted_s(draft: Draft, updates: Updates) -> float | None:
    """Seconds of a step with these updates, by simulation of copies; None where DRAM or SSDs are too small."""
    programs = [program.copy() for program in draft.programs]
    write_updates(programs, updates, choose_timings(draft, updates, TIMINGS))
    if not within_hosts(programs, draft.lane_hardware):
        return None
    return simulate(programs, draft.machine, precision=draft.options.precision).step_s


def within_hosts(programs: Sequence[Program], hardware: Hardware) -> bool:
    """Whether each host's DRAM and SSDs hold what its devices' programs take of them."""
    taken: dict[str, int] = defaultdict(int)
    for program in programs:
        host, peaks = hardware.devices[program.device].host, profile_memory(program).peak_bytes
        for memory in (ops.DRAM, ops.SSD):
            taken[f"{memory}{host}"] += peaks[memory]
    return all(num_bytes <= hardware.budget_bytes(memory) for memory, num_bytes in taken.items() if num_bytes)


def _takes(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"takes {seconds:.4g} s a step"


def redo_s(draft: Draft, updates: Updates) -> float:
    """Seconds to undo and repeat all speculative steps: what was kept comes back, the CPU steps, SSDs take the result.

    The host that needs longest counts; its devices share its CPU and its SSDs.
    """
    took_s = dict.fromkeys(range(len(draft.lane_hardware.hosts)), 0.0)
    for program in draft.programs:
        host = draft.lane_hardware.devices[program.device].host
        interface, rates = program.interface, draft.lane_hardware.hosts[host]
        for value in program.results().get("grads", []):
            stage = str(value.meta["type"].stage)
            if updates.where[stage] == ops.DEVICE or updates.is_late(stage):
                continue
            spec = interface.part_of(stage, ops.SHARDS if interface.shards > 1 else "")
            took_s[host] += spec.trained_params / rates.optimizer_params_per_s
            kept = interface.states_bytes(spec)
            if updates.where[stage] == ops.SSD:
                kept = interface.all_bytes(spec) if draft.ssd.stages.get(stage) == "all" else kept
                took_s[host] += kept / draft.lane_hardware.bandwidth(f"ssd{host}", f"dram{host}")
                took_s[host] += kept / draft.lane_hardware.bandwidth(f"dram{host}", f"ssd{host}")
            else:
                took_s[host] += 2 * kept / rates.dram_bandwidth
    return max(took_s.values())


def written_bytes(program: Program) -> int:
    """Bytes that a program writes to SSD in one step."""
    return sum(work_of(program, node).moved_bytes for node in program.ops() if node.target is ops.write)
