"""The least contents of SSDs: all that persists in DRAM, or is there for an update or loading, against DRAM's room.

Devices of one host share its DRAM and its SSDs, so all of them are decided together. The bytes are those that the
programs will take once they are rewritten (`dram_peak.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ...ir import ops
from ...ir.errors import DoesNotFit, PassError
from ...ir.program import StageHome, StageSpec, bytes_of_homes, homes_of, plan_arena
from ...ir.units import format_bytes
from ..decisions import StageTiers
from ..draft import Draft
from .dram_room import lacking_bytes, peaks_by_host
from .timing import Timing, Updates, updates_of

MOST_READS_AHEAD = 4
# Room to read, step and write at the same time is worth having more on SSD; without it, a plan may still fit.
COMFORTS = ((Timing(1, buffers=2), 1), (Timing(0, buffers=2), 1), (Timing(0, buffers=1), 1), (Timing(0, buffers=1), 0))
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, without their whole parts, are spread evenly however many there are


class SsdRoom:
    """`able`: the stages that SSDs could hold, in stage order; `hosts`: per host the DRAM of its devices' programs."""

    def __init__(self, draft: Draft):
        self.draft, self.hardware = draft, draft.lane_hardware
        self.hosts = peaks_by_host(draft)
        self.home: dict[str, str] = {}  # stage -> memory of its weights
        swapped: set[str] = set()
        for program in draft.programs:
            for stage, home in homes_of(program).items():
                self.home.setdefault(stage, home.weights)
                if home.weights == ops.DRAM:
                    swapped.add(stage)
        self.specs = {s.spec.name: s.spec for s in draft.stages}
        self.able = [name for name, spec in self.specs.items() if name in swapped and spec.params]

    def choose(self, hosts: Sequence[int], tier: str) -> tuple[StageTiers, int]:
        """The tiers of the stages of these hosts that go to SSD, and the number of phases by which weights are read
        ahead.

        Raises `DoesNotFit` and `PassError` as `InsertSsd.plan`.
        """
        stages = self.stages_of(hosts)
        levels = {"auto": range(2 * len(stages) + 1), "states": [len(stages)], "all": [2 * len(stages)]}[tier]
        if tier != "auto" and stages:
            self.require_ssds(hosts, f"insert-ssd with tier={tier}")
        if not all(self.hardware.hosts[host].ssds for host in hosts):
            levels = levels[:1]
        for timing, ahead in COMFORTS:

            def fits(level: int, timing: Timing = timing, ahead: int = ahead) -> bool:
                return self.missing(hosts, tiers_at(self.specs, stages, level), timing, ahead) <= 0

            if not fits(levels[-1]):
                continue
            # The first stage on SSD frees no more than its buffer takes; only after it do higher levels take less DRAM.
            level = levels[0 if fits(levels[0]) else bisect_left(levels, True, hi=len(levels) - 1, key=fits)]
            tiers = tiers_at(self.specs, stages, level)
            self.require_space(hosts, tiers)
            deepest = self.wanted_ahead(hosts) if timing == COMFORTS[0][0] else ahead
            while deepest > ahead and self.missing(hosts, tiers, timing, deepest) > 0:
                deepest -= 1
            return tiers, deepest
        raise self.too_little_dram(hosts, tiers_at(self.specs, stages, levels[-1]))

    def stages_of(self, hosts: Sequence[int]) -> list[str]:
        """The stages of these hosts that SSDs could hold; the first N of them are spread evenly over the model."""
        there = {stage for host in hosts for peak in self.hosts[host] for stage in peak.in_dram}
        mine = [stage for stage in self.able if stage in there]
        return [stage for _, stage in sorted((i * GOLDEN % 1, stage) for i, stage in enumerate(mine))]

    def missing(self, hosts: Sequence[int], tiers: StageTiers, timing: Timing, ahead: int) -> int:
        """The most bytes of DRAM that any of these hosts lacks, in a step or while weights are loaded; below 0, every
        host has bytes left."""
        updates, whole = self.updates(tiers), [stage for stage, tier in tiers.items() if tier == "all"]
        return max(lacking_bytes(self.draft, host, self.hosts[host], updates, timing, whole, ahead) for host in hosts)

    def updates(self, tiers: StageTiers) -> Updates:
        where = {stage: ops.SSD if stage in tiers else home for stage, home in self.home.items()}
        return updates_of(self.draft, where | {s: ops.DEVICE for s in where if self.specs[s].staying})

    def wanted_ahead(self, hosts: Sequence[int]) -> int:
        """The phases between a read of weights and their fetch: a device's number of fetches in the time of a read."""
        found = 1
        for host in hosts:
            if not self.hardware.hosts[host].ssds:
                continue
            read = self.hardware.bandwidth(f"ssd{host}", f"dram{host}") / len(self.hosts[host])
            for peak in self.hosts[host]:
                device = self.hardware.devices[peak.program.device].name
                found = max(found, math.ceil(self.hardware.bandwidth(f"dram{host}", device) / read))
        return min(found, MOST_READS_AHEAD)

    def require_ssds(self, hosts: Sequence[int], who: str) -> None:
        for host in hosts:
            if not self.hardware.hosts[host].ssds:
                raise PassError(
                    f"{who} needs SSDs, and host {host} of {self.hardware.name} has none; give it some (ssds=2)"
                )

    def require_space(self, hosts: Sequence[int], tiers: StageTiers) -> None:
        """Raise `DoesNotFit` where the SSDs of a host are too small for these tiers."""
        for host in hosts if tiers else ():
            need, budget = self.ssd_bytes(host, tiers), self.hardware.budget_bytes(f"ssd{host}")
            if need > budget:
                raise DoesNotFit(
                    f"ssd{host} has {format_bytes(budget)} usable, and {format_bytes(need)} of weights, masters and "
                    f"optimizer states do not fit DRAM: missing {format_bytes(need - budget)}",
                    memory=f"ssd{host}",
                    missing_bytes=need - budget,
                )

    def ssd_bytes(self, host: int, tiers: StageTiers) -> int:
        """The bytes that persist on the SSDs of a host, and those of the activations that are written there."""
        total = 0
        for peak in self.hosts[host]:
            homes = {
                stage: StageHome(
                    ops.SSD if tiers.get(stage) == "all" else ops.DRAM,
                    ops.SSD if stage in tiers and _moving_states(self.specs[stage]) else None,
                    peak.group,
                )
                for stage in peak.in_dram
            }
            total += bytes_of_homes(peak.interface, homes).total(ops.SSD) + plan_arena(peak.program, ops.SSD)[1]
        return total

    def too_little_dram(self, hosts: Sequence[int], tiers: StageTiers) -> DoesNotFit:
        """The error where SSDs with all that they can take leave too much in DRAM."""
        timing, ahead = COMFORTS[-1]
        host = max(hosts, key=lambda host: self.missing([host], tiers, timing, ahead))
        missing, budget = self.missing([host], tiers, timing, ahead), self.hardware.dram_budget_bytes(host)
        ssds = self.hardware.hosts[host].ssds
        there = (
            "with all that may on SSD"
            if "all" in tiers.values()
            else "with states alone on SSD (tier=all: weights too)"
        )
        there = there if ssds else "and there are no SSDs (give it some: ssds=2)"
        waiting = self.updates(tiers).max_norm is not None
        hint = (
            "all gradients wait there for their norm"
            if waiting
            else "smaller stages hold less there while they are updated"
        )
        return DoesNotFit(
            f"dram{host} has {format_bytes(budget)} usable and needs {format_bytes(budget + missing)}, missing "
            f"{format_bytes(missing)}, {there}; {hint}",
            memory=f"dram{host}",
            missing_bytes=missing,
        )


def tiers_at(specs: Mapping[str, StageSpec], stages: Sequence[str], level: int) -> StageTiers:
    """The tiers of a level: each level moves the states of one more stage to SSD, after all states the weights of
    one."""
    states: StageTiers = {stage: "states" for stage in stages[:level] if _moving_states(specs[stage])}
    return {**states, **{stage: "all" for stage in stages[: max(0, level - len(stages))]}}


def _moving_states(spec: StageSpec) -> bool:
    """Whether it has masters or states that need not be on its device."""
    return bool(spec.trained_params) and not spec.staying
