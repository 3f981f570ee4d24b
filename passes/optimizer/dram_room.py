"""The DRAM of a draft's hosts, shared by their devices, and the timing of updates that it has room for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from ..draft import Draft
from .dram_peak import DramPeak
from .loading import LoadedDevice, loading_bytes
from .timing import Timing, Updates


def peaks_by_host(draft: Draft) -> dict[int, list[DramPeak]]:
    """The programs of each host's devices."""
    found: dict[int, list[DramPeak]] = defaultdict(list)
    for program in draft.programs:
        found[draft.lane_hardware.devices[program.device].host].append(DramPeak(program))
    return dict(found)


def lacking_bytes(
    draft: Draft,
    host: int,
    peaks: Sequence[DramPeak],
    updates: Updates,
    timing: Timing,
    weights: Collection[str] = (),
    ahead: int = 0,
) -> int:
    """Bytes of DRAM that a host lacks, in a step or while weights are loaded; below 0, it has bytes left. `weights`,
    `ahead`: see `DramPeak.bytes`."""
    hardware = draft.lane_hardware
    needs = [peak.need(updates, timing, weights, ahead) for peak in peaks]
    devices = [
        LoadedDevice(
            peak.interface,
            need.homes,
            need.lasting_bytes,
            need.arena_bytes,
            hardware.devices[peak.program.device].kind == "cuda",
        )
        for peak, need in zip(peaks, needs, strict=True)
    ]
    loading = loading_bytes(devices, processes=draft.machine.num_devices)
    return max(loading, sum(need.step_bytes for need in needs)) - hardware.dram_budget_bytes(host)


def choose_timings(draft: Draft, updates: Updates, timings: Sequence[Timing]) -> list[Timing]:
    """Per device the first timing with which the programs of its host fit its DRAM; where none does, the last one, and
    the check of the budgets says what is missing."""
    chosen: dict[int, Timing] = {}
    for host, peaks in peaks_by_host(draft).items():
        fitting = (t for t in timings if lacking_bytes(draft, host, peaks, updates, t) <= 0)
        chosen[host] = next(fitting, timings[-1])
    return [chosen[draft.lane_hardware.devices[program.device].host] for program in draft.programs]
