"""Bytes of a host's DRAM and SSDs that its programs need, by purpose, in a step and while weights load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import MemoryProfile, Program, homes_of, profile_memory
from ...passes.optimizer.loading import LoadedDevice, loading_bytes

ARENA = {ops.DRAM: "read and offloaded values", ops.SSD: "activations"}
PASSING = "gradients on their way"


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one memory at its peak in a step, by purpose, and all its bytes while weights are loaded."""

    memory: str
    parts: dict[str, int]
    loading_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def peak_bytes(self) -> int:
        return max(self.step_bytes, self.loading_bytes)


def tier_of(memory: str) -> str:
    """The tier of a memory by its name: "dram0", "ssd0", or any other name for a device's memory."""
    return next((tier for tier in (ops.DRAM, ops.SSD) if memory.startswith(tier)), ops.DEVICE)


def host_of(memory: str) -> int:
    """Index of the host that "dram0" or "ssd0" belongs to."""
    return int(memory.removeprefix(ops.DRAM).removeprefix(ops.SSD))


def host_needs(programs: Sequence[Program], hardware: Hardware) -> list[MemoryNeed]:
    """The need of each host's DRAM, and of SSDs where its programs use them, with the devices' peaks added up."""
    by_host: dict[int, list[tuple[Program, MemoryProfile]]] = defaultdict(list)
    for program in programs:
        by_host[hardware.devices[program.device].host].append((program, profile_memory(program)))
    needs = []
    for host, rows in by_host.items():
        profiles = [profile for _, profile in rows]
        loading = loading_bytes([_loaded_device(*row, hardware) for row in rows], len(programs))
        needs.append(MemoryNeed(f"dram{host}", _parts(profiles, ops.DRAM), loading))
        if any(profile.peak_bytes[ops.SSD] for profile in profiles):
            needs.append(MemoryNeed(f"ssd{host}", _parts(profiles, ops.SSD)))
    return needs


def evaluation_lacks(programs: Sequence[Program], evaluation: Sequence[Program], hardware: Hardware) -> int:
    """Bytes that the host shortest of DRAM lacks for evaluation: its results come beside what training keeps there."""
    taken: dict[int, int] = defaultdict(int)
    for step, evaluate in zip(programs, evaluation, strict=True):
        own, other = profile_memory(step), profile_memory(evaluate)
        values = other.peak_bytes[ops.DRAM] - other.persistent.total(ops.DRAM) - other.arenas[ops.DRAM]
        arena = max(own.arenas[ops.DRAM], other.arenas[ops.DRAM])
        taken[hardware.devices[step.device].host] += own.persistent.total(ops.DRAM) + arena + values
    return max(0, *(num_bytes - hardware.dram_budget_bytes(host) for host, num_bytes in taken.items()))


def _parts(profiles: Sequence[MemoryProfile], memory: str) -> dict[str, int]:
    parts: dict[str, int] = defaultdict(int)
    for profile in profiles:
        held = {**profile.persistent.parts(memory), ARENA[memory]: profile.arenas[memory]}
        held[PASSING] = profile.peak_bytes[memory] - sum(held.values())
        for what, num_bytes in held.items():
            parts[what] += num_bytes
    return {what: num_bytes for what, num_bytes in parts.items() if num_bytes}


def _loaded_device(program: Program, profile: MemoryProfile, hardware: Hardware) -> LoadedDevice:
    pinned = hardware.devices[program.device].kind == "cuda"
    lasting = profile.persistent.total(ops.DRAM)
    return LoadedDevice(program.interface, homes_of(program), lasting, profile.arenas[ops.DRAM], pinned)
