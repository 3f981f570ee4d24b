"""`overlap-optimizer`: stages are stepped on the CPU under the backward of others, with states from SSD or in DRAM.

In: programs whose results hold every stage's gradients, and what `insert-ssd` put on SSD. Out: programs that update the
weights (Fuyou 4.3). A stage's states are read while stages before it run backward, its gradients are offloaded right
after its last backward and never written to SSD, it is stepped after the offload of the next stage, and written back
while the next is stepped. DRAM decides the number of buffers of states, and whether it holds the gradients of two
stages.

Clipping, and the loss scale of fp16, need the norm of all gradients. `exact` steps everything after the norm, with
reads, steps and writes still overlapping. `speculative` steps as if nothing had to be clipped and undoes that where the
norm says otherwise (SuperOffload: step, validate, roll back). Before such a step of a stage in DRAM its masters and
states are copied, for which the CPU has time only while it waits for gradients: often it is best for a part of the
stages, those whose gradients come first. All gradients stay in DRAM until the norm is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ...ir import ops
from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, profile_memory, work_of
from ...ir.units import format_bytes
from ..base import Explanation, Pass
from ..decisions import OPTIMIZER, Decision
from ..draft import Draft
from ..receive_earlier import simulated_s
from .dram_room import choose_timings
from .insert_optimizer import require_where, stepped_where
from .timing import Timing, Updates, updates_of
from .updates import write_updates

WORTH = 1.01  # speculation that is faster by less is not worth what a clipped step costs
PARTS = (1 / 4, 1 / 8)  # steps towards the best share of the stages
Clipping = str | list[str]
# "" where updates need no norm; a list: the stages that are stepped before it is known
CLIPPING = Decision("clipping", Literal["", "exact", "speculative"] | list[str], "", hashed=True)
EXPLAINED = {
    "exact": "gradients are clipped exactly: every step waits for the norm of all gradients",
    "speculative": "stages are stepped before the norm of all gradients is known, again where it must be clipped",
}
CLIPS = ("auto", "exact", "speculative")
TIMINGS = (Timing(1, 3), Timing(1, 2), Timing(0, 2), Timing(1, 1), Timing(0, 1))  # gradients are smaller than states


@dataclass(frozen=True)
class OverlapOptimizer(Pass):
    """`overlap`: false steps everything after the last backward, for comparison. `clip`: see above; auto takes the
    fastest of those that fit, which may be speculative for some stages alone."""

    name: ClassVar[str] = "overlap-optimizer"
    rank: ClassVar[int] = 81
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers")
    gives: ClassVar[tuple[str, ...]] = ("optimizer",)
    label_rank: ClassVar[int] = 3
    decides: ClassVar[tuple[Decision, ...]] = (OPTIMIZER, CLIPPING)
    overlap: bool = True
    clip: str = "auto"

    def __post_init__(self) -> None:
        if self.clip not in CLIPS:
            raise PassError(f"pass {self.name!r}: option clip={self.clip!r} is none of {', '.join(CLIPS)}")
        if self.clip == "speculative" and not self.overlap:
            raise PassError(
                f"pass {self.name!r}: clip=speculative steps before the norm is known, so not overlap=false"
            )

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        """With a reservoir it is usual."""
        return [] if any("ssd" in p.gives for p in passes) else ["optimizer overlapped"]

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        if isinstance(decisions.clipping, list):
            part = f"{len(decisions.clipping)} of {len(decisions.stages)} "
            return Explanation([f"{part}{EXPLAINED['speculative']}"])
        return Explanation([EXPLAINED[decisions.clipping]] if decisions.clipping else [])

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`optimizer`: the memory of each stage's states; `clipping`: "exact", "speculative", the stages for which it
        is speculative, or "" where the norm is not needed."""
        where = stepped_where(draft)
        return {"optimizer": where, "clipping": self._clipping(draft, self._updates(draft, where))}

    def rewrite(self, draft: Draft, decision: dict[str, Any]) -> None:
        where, clipping = decision["optimizer"], decision["clipping"]
        require_where(where, stepped_where(draft))
        updates = self._updates(draft, where)
        allowed = ("",) if updates.max_norm is None else CLIPS[1:] if self.overlap else CLIPS[1:2]
        if isinstance(clipping, list):
            unknown = [stage for stage in clipping if stage not in where]
            if unknown:
                raise PassError(f"clipping names {unknown[0]!r}; the stages are {', '.join(where)}")
        if ("speculative" if isinstance(clipping, list) else clipping) not in allowed:
            named = " or ".join(repr(name) for name in allowed)
            raise PassError(f"clipping is {clipping!r}; with these options it is {named}")
        updates = with_clipping(updates, clipping)
        write_updates(draft.programs, draft.lane_hardware, updates, choose_timings(draft, updates, TIMINGS))
        said = [draft.notes[self.name]] if self.name in draft.notes else []
        written = sum(written_bytes(program) for program in draft.programs)
        if written:
            draft.notes[self.name] = "; ".join([*said, f"{format_bytes(written)} are written to SSD in a step"])

    def _updates(self, draft: Draft, where: dict[str, str]) -> Updates:
        return replace(updates_of(draft, where), overlap=self.overlap)

    def _clipping(self, draft: Draft, updates: Updates) -> Clipping:
        """The fastest way to clip that fits; the draft's notes say what each takes."""
        if updates.max_norm is None:
            return ""
        if self.clip == "speculative":
            return self.clip
        able = self._early(replace(updates, speculative=True))
        if self.clip == "exact" or not self.overlap or not able:
            return "exact"
        found: dict[float, tuple[Clipping, float | None]] = {}  # share of the stages -> clipping, its step

        def best(shares: Sequence[float]) -> float:
            for share in shares:
                if 0 <= share <= 1 and share not in found:
                    clipping = clipping_of(draft, able, share)
                    found[share] = clipping, predicted_s(draft, with_clipping(updates, clipping))
            fitting = {share: seconds for share, (_, seconds) in found.items() if seconds is not None}
            return min(fitting, key=lambda share: fitting[share] * (WORTH if share else 1), default=0.0)

        share = best((0.0, 1.0))
        if any(updates.where[stage] == ops.DRAM for stage in able):  # each of these is copied before it is stepped
            share = best((1 / 2,))
            for width in PARTS:
                share = best((share - width, share + width))
        self._note(draft, updates, found, share)
        return found[share][0]

    def _note(
        self, draft: Draft, updates: Updates, found: dict[float, tuple[Clipping, float | None]], share: float
    ) -> None:
        names = {0.0: "exact", 1.0: "speculative"}
        said = [f"{name} clipping {_takes(found[at][1])}" for at, name in names.items()]
        if share not in names:
            chosen, seconds = found[share]
            names[share] = f"speculative in {len(chosen)} of {len(updates.where)} stages"
            said.append(f"in this part of the stages it {_takes(seconds)}")
        again_s = redo_s(draft, with_clipping(updates, found[share or 1.0][0]))
        said.append(f"a step that is clipped takes {again_s:.4g} s more where that was speculative")
        draft.notes[self.name] = "; ".join([f"clips {names[share]}", *said])

    def _early(self, updates: Updates) -> list[str]:
        """The stages that can be stepped before the norm is known."""
        return [s for s, memory in updates.where.items() if memory != ops.DEVICE and not updates.is_late(s)]


def with_clipping(updates: Updates, clipping: Clipping) -> Updates:
    early = frozenset(clipping) if isinstance(clipping, list) else None
    return replace(updates, speculative=early is not None or clipping == "speculative", early=early)


def clipping_of(draft: Draft, able: Collection[str], share: float) -> Clipping:
    """The decision to clip speculatively for a share of each device's stages, those whose gradients come first."""
    if share in (0.0, 1.0):
        return "speculative" if share else "exact"
    chosen: set[str] = set()
    for program in draft.programs:
        place = {node: i for i, node in enumerate(program.graph.nodes)}
        grads = sorted(program.results().get("grads", []), key=lambda node: place[node])
        mine = [stage for stage in (str(node.meta["type"].stage) for node in grads) if stage in able]
        chosen |= set(mine[: math.ceil(share * len(mine))])
    return [stage.spec.name for stage in draft.stages if stage.spec.name in chosen]


def predicted_s(draft: Draft, updates: Updates) -> float | None:
    """Seconds of a step with these updates, by simulation of copies; None where DRAM or SSDs are too small, or device
    memory so tight that devices would wait for ever."""
    programs = [program.copy() for program in draft.programs]
    write_updates(programs, draft.lane_hardware, updates, choose_timings(draft, updates, TIMINGS))
    if not fit_hosts(programs, draft.lane_hardware):
        return None
    return simulated_s(draft, programs)


def fit_hosts(programs: Sequence[Program], hardware: Hardware) -> bool:
    """Whether each host's DRAM and SSDs hold all that its devices' programs store there."""
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
            group = ops.SHARDS if interface.shards > 1 else ""
            spec = interface.part_of(stage, group)
            took_s[host] += spec.trained_params / rates.optimizer_params_per_s
            kept = interface.states_bytes(spec)
            if updates.where[stage] == ops.SSD:
                kept = interface.updated_bytes(spec, group) if draft.ssd.stages.get(stage) == "all" else kept
                took_s[host] += kept / draft.lane_hardware.bandwidth(f"ssd{host}", f"dram{host}")
                took_s[host] += kept / draft.lane_hardware.bandwidth(f"dram{host}", f"ssd{host}")
            else:
                took_s[host] += 2 * interface.copied_to_undo(spec) / rates.dram_bandwidth
    return max(took_s.values())


def written_bytes(program: Program) -> int:
    """Bytes that a program writes to SSD in one step."""
    return sum(work_of(program, node).moved_bytes for node in program.ops() if node.target is ops.write)
