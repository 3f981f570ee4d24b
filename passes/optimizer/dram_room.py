"""The DRAM of a draft's hosts, shared by their devices, and the timing of updates that it has room for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..draft import Draft
from .dram_peak import DramPeak
from .timing import Timing, Updates


def by_host(draft: Draft) -> dict[int, list[DramPeak]]:
    """The programs of each host's devices."""
    found: dict[int, list[DramPeak]] = defaultdict(list)
    for program in draft.programs:
        found[draft.lane_hardware.devices[program.device].host].append(DramPeak(program))
    return dict(found)


def choose_timings(draft: Draft, updates: Updates, timings: Sequence[Timing]) -> list[Timing]:
    """Per device the first timing with which the programs of its host fit its DRAM; where none does, the last one, and
    the check of the budgets says what is missing."""
    chosen: dict[int, Timing] = {}
    for host, peaks in by_host(draft).items():
        budget = draft.lane_hardware.dram_budget_bytes(host)
        fitting = (t for t in timings if sum(peak.bytes(updates, t) for peak in peaks) <= budget)
        chosen[host] = next(fitting, timings[-1])
    return [chosen[draft.lane_hardware.devices[program.device].host] for program in draft.programs]
