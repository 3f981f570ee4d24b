"""`insert-shard`: lanes share their stages. Every device keeps a part of the weights, gradients and optimizer states of
each of its stages, and has a stage whole only while it runs (MiCS 3.2; over all devices that is ZeRO-3, with shards in
DRAM ZeRO-3 with CPU offload: Mobius section 2.2 and eq. 2).

In: programs of a lane whose stages are shared with other lanes, on resident weights. Out: the same programs in which
each phase of a stage begins with an `all_gather` over those that share it, of shards that stay on the device, or are
fetched from the host's DRAM, where `insert-ssd` may move them on to SSDs. How many phases ahead stages are gathered,
and which stay whole from their first use to their last, is decided here once, by what the device's memory holds. Where
members of a group are on several hosts, several on each, they gather in a hierarchy (MiCS 3.3).

`insert-two-hop`, or else the pass that updates, scatters the sum of each stage's gradients, and every device steps its
shard in the shard's memory. A shard is a slice of the flat stage (`ir/stages/flat.py`), so gathers and
scatters need no copies in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import StageHome, StageSpec, bytes_of_homes, members_of, seats_of
from ..base import Pass
from ..decisions import FETCH, SHARDING, Decision, MemoryName, Sharding
from ..draft import Draft
from ..equal_programs import look, once
from .gathering import gather_weights, peak_bytes
from .gradient_sums import STEP, TWO_HOP

SHARD_TIERS: dict[str, tuple[MemoryName, ...]] = {  # option `tier` to the memories that are tried in turn
    "auto": (ops.DEVICE, ops.DRAM),
    "device": (ops.DEVICE,),
    "dram": (ops.DRAM,),
    "ssd": (ops.SSD,),
}
HOW = ("auto", "true", "false")
MOST_GATHERS_AHEAD = 8


@dataclass(frozen=True)
class InsertShard(Pass):
    """`tier`: the home of shards; auto: the devices where these hold them, their states and everything else, else
    DRAM. `prefetch`: the most phases between a gather and its use. `hold`: whether stages may stay whole for all
    micro-batches, as far as memory has room; `hold_all`: all of them do, as in ZeRO-1 and ZeRO-2. `hierarchical`:
    gather between hosts first; auto: where that can be done.

    Raises `PassError` where no lanes share their weights, for shards on SSD without `insert-ssd`, and for
    `hierarchical=true` with groups that form no hierarchy.
    """

    name: ClassVar[str] = "insert-shard"
    rank: ClassVar[int] = 63
    needs: ClassVar[tuple[str, ...]] = ("programs", "mesh", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    label_rank: ClassVar[int] = 1
    decides: ClassVar[tuple[Decision, ...]] = (FETCH, SHARDING)
    tier: str = "auto"
    prefetch: int = 2
    hold: bool = True
    hold_all: bool = False
    hierarchical: str = "auto"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("tier", self.tier, tuple(SHARD_TIERS)),
            ("hierarchical", self.hierarchical, HOW),
        ):
            if value not in allowed:
                raise PassError(f"pass {self.name!r}: option {option}={value!r} is none of {', '.join(allowed)}")
        if self.hold_all and not self.hold:
            raise PassError(f"pass {self.name!r}: hold_all=true holds what hold=false lets go: leave one of them out")
        if not 0 <= self.prefetch <= MOST_GATHERS_AHEAD:
            raise PassError(f"pass {self.name!r}: option prefetch={self.prefetch}; allowed: 0 to {MOST_GATHERS_AHEAD}")

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        chosen = ["activations chosen"] if any("ssd" in p.gives for p in passes) else []
        return chosen + ["all held"] * self.hold_all + ["none held"] * (not self.hold)

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`fetch`: the stages whose shards come from DRAM; `sharding`: see `Sharding`."""
        require_shards(self, draft)
        room = _Room(draft)
        by_host = self._gathers_by_host(draft)
        tries = [Sharding(tier=t, ahead=self.prefetch, hierarchical=by_host) for t in SHARD_TIERS[self.tier]]
        found = next((s for t in tries if (s := room.earliest(t))), None)
        if found is None:  # the check of the budgets says what is missing
            found = tries[-1].model_copy(update={"ahead": 0})
        elif self.hold and not self.hold_all:
            found = room.holding(found)
        names = [stage.spec.name for stage in draft.stages if stage.spec.params]
        if self.hold_all:
            found = found.model_copy(update={"held": names})
        fetched: dict[str, dict[str, int]] = {} if found.tier == ops.DEVICE else {name: {} for name in names}
        return {"fetch": fetched, "sharding": found}

    def rewrite(self, draft: Draft, decision: dict[str, Any]) -> None:
        require_shards(self, draft)
        given: Sharding = decision["sharding"]
        names = [stage.spec.name for stage in draft.stages if stage.spec.params]
        odd = sorted({*given.held, *decision["fetch"]} - set(names))
        if odd:
            raise PassError(f"sharding names {odd[0]!r}; the stages with weights are {', '.join(names)}")
        if given.tier not in ops.MEMORIES or not 0 <= given.ahead <= MOST_GATHERS_AHEAD:
            raise PassError(
                f"sharding has shards on {given.tier!r}, gathered {given.ahead} phases ahead; allowed: "
                f"{', '.join(ops.MEMORIES)}, and 0 to {MOST_GATHERS_AHEAD}"
            )
        if bool(decision["fetch"]) == (given.tier == ops.DEVICE):
            raise PassError(f"sharding has shards on {given.tier!r}, but fetch names {list(decision['fetch'])}")
        draft.sharding = given
        for program in draft.programs:
            gather_weights(program, given)

    def check_pipeline(self, given: Collection[str]) -> None:
        if self.tier == ops.SSD and "ssd" not in given:
            raise PassError(
                f"{self.name}: tier=ssd needs insert-ssd after it: insert-shard{{tier=ssd}}, insert-ssd, "
                "overlap-optimizer"
            )

    def _gathers_by_host(self, draft: Draft) -> bool:
        """Whether to gather in a hierarchy."""
        count, depth = len(draft.mesh.lanes), len(draft.mesh.lanes[0])
        able = any(_is_grid(draft, lane, role) for lane in range(count) for role in range(depth))
        if self.hierarchical == "true" and not able:
            raise PassError(
                f"{self.name}: hierarchical=true needs groups with the same number of members, at least 2, on each of "
                f"several hosts; {draft.mesh.shards} shards of {draft.machine.name} are not so"
            )
        return able and self.hierarchical != "false"


def require_shards(p: Pass, draft: Draft) -> None:
    """Raise `PassError` where no lanes share their weights."""
    if draft.mesh.shards == 1:
        raise PassError(f"{p.name}: no lanes share their weights; say how many, such as mesh{{shards=2}}")


def _is_grid(draft: Draft, lane: int, role: int) -> bool:
    """Whether the group that shares the stages of a device has several members on each of several hosts."""
    interface, devices = draft.programs[0].interface, draft.machine.devices
    members = members_of(interface, lane, role, ops.SHARDS)
    return bool(seats_of([devices[member].host for member in members], 0).hosts)


class _Room:
    """The room in the memories of a draft's devices; alike programs are tried once."""

    def __init__(self, draft: Draft):
        self.draft = draft
        # Where `insert-two-hop` follows, no device need hold all gradients; otherwise the sums are taken once a step.
        self.every = TWO_HOP if "sums" in draft.promised else STEP
        self.specs = [[s.spec for s in draft.stages_on(program.device)] for program in draft.programs]
        self.looks = [look(program, specs) for program, specs in zip(draft.programs, self.specs)]
        self.budgets = [draft.lane_hardware.devices[program.device].budget_bytes for program in draft.programs]
        self.known: dict[Hashable, int] = {}

    def spare_bytes(self, sharding: Sharding) -> int:
        """Bytes left on the device that has the least left; below 0 where something does not fit."""
        return min(budget - self._peak(number, sharding) for number, budget in enumerate(self.budgets))

    def _peak(self, number: int, sharding: Sharding) -> int:
        held = tuple(i for i, spec in enumerate(self.specs[number]) if spec.name in sharding.held)

        def trial_bytes() -> int:
            trial = self.draft.programs[number].copy()
            gather_weights(trial, sharding)
            return peak_bytes(trial, self.every)

        return once(
            self.known, (self.looks[number], held, sharding.tier, sharding.ahead, sharding.hierarchical), trial_bytes
        )

    def earliest(self, sharding: Sharding) -> Sharding | None:
        """The sharding that gathers as far ahead as fits; None where it does not fit even without looking ahead."""
        if sharding.tier == ops.DEVICE and any(self._lasting(i) > budget for i, budget in enumerate(self.budgets)):
            return None  # seen without a trial
        tries = (sharding.model_copy(update={"ahead": ahead}) for ahead in range(sharding.ahead, -1, -1))
        return next((s for s in tries if self.spare_bytes(s) >= 0), None)

    def _lasting(self, number: int) -> int:
        """The bytes that a device keeps of its stages across steps, where it holds their shards."""
        interface = self.draft.programs[number].interface
        homes = {spec.name: StageHome(ops.DEVICE, ops.DEVICE, ops.SHARDS) for spec in self.specs[number] if spec.params}
        return bytes_of_homes(interface, homes).total(ops.DEVICE)

    def _gathered_bytes(self, spec: StageSpec) -> int:
        return self.draft.programs[0].interface.gathered_bytes(spec.name, ops.SHARDS)

    def holding(self, sharding: Sharding) -> Sharding:
        """The sharding that holds the most stages whole for all micro-batches that fit, of each device the last stages
        first: they are needed again soonest, and the others take turns."""
        rows = [[spec for spec in specs if spec.params] for specs in self.specs]

        def sharding_with(count: int) -> Sharding:
            names = [s.name for row in rows for s in row[max(0, len(row) - count) :]]
            return sharding.model_copy(update={"held": names})

        # Held stages fill the places that stages had in turn, and then take bytes of their own.
        turns = (sharding.ahead + 2) * max(self._gathered_bytes(spec) for row in rows for spec in row)
        room = self.spare_bytes(sharding) + turns
        longest = max(len(row) for row in rows)
        limits = [bisect_right([*accumulate(self._gathered_bytes(s) for s in reversed(row))], room) for row in rows]
        most = min((limit for limit, row in zip(limits, rows) if limit < len(row)), default=longest)
        return sharding_with(_most(most, lambda count: self.spare_bytes(sharding_with(count)) >= 0))


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count up to `most` that fits; 0 always does. `most` is tried first: it is likely to fit."""
    low, high, middle = 0, most, most
    while low < high:
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low
