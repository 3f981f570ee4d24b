"""The DRAM of a draft's hosts, shared by their devices, and how far apart updates may be in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..draft import Draft
from .dram_peak import DramPeak
from .timing import Timing, Updates


def by_host(draft: Draft) -> dict[int, list[DramPeak]]:
    """Per host its devices' programs."""
    found: dict[int, list[DramPeak]] = defaultdict(list)
    for program in draft.programs:
        found[draft.lane_hardware.devices[program.device].host].append(DramPeak(program))
    return dict(found)


def choose_timings(draft: Draft, updates: Updates, timings: Sequence[Timing]) -> list[Timing]:
    """Per device the first with which the programs of its host fit its DRAM; the last where none does, and whoever
    checks the budgets says what is missing."""
    chosen: dict[int, Timing] = {}
    for host, peaks in by_host(draft).items():
        budget = draft.lane_hardware.dram_budget_bytes(host)
        fitting = (t for t in timings if sum(peak.bytes(updates, t) for peak in peaks) <= budget)
        chosen[host] = next(fitting, timings[-1])
    return [chosen[draft.lane_hardware.devices[program.device].host] for program in draft.programs]
