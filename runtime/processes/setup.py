"""What a training script tells its devices before they start, and what follows from the files that they will run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import (
    Interface,
    Program,
    bind,
    bound_interface,
    homes_of,
    members_of,
    parse_program,
    place_of,
    profile_memory,
)
from ..device.file import FUNCTIONS
from ..device.setup import TIMEOUT_S, DeviceSetup, HostShare
from ..emulate.throttle import SharedTransfers, shared_transfers
from ..optimizer.stage_optimizer import OptimizerSpec


@dataclass(frozen=True)
class RunSetup:
    """Everything that the devices need to start. `files`: one generated file per device of a lane, in their order.

    `ssd_dirs`: directories for files, one per SSD, the same on every host; without them each host's own in the hardware
    document. `ssd_verify`: check all that is read from SSD.
    """

    files: Sequence[Path]
    interface: Interface
    hardware: Hardware
    optimizer: OptimizerSpec | None = None
    precision: str = "fp32"
    seed: int = 0
    timeout_s: float = TIMEOUT_S  # until a silent peer counts as lost
    ssd_dirs: Sequence[str] = ()
    ssd_verify: bool = False

    @cached_property
    def roles(self) -> list[dict[str, Program]]:
        """Per device of a lane its programs by name, read from the files."""
        found: list[dict[str, Program]] = []
        for role, path in enumerate(self.files):
            text = Path(path).read_text()
            names = [name for name in FUNCTIONS if f"def {name}(rt, batch)" in text]
            found.append({name: parse_program(text, self.interface, role, name) for name in names})
        return found

    @cached_property
    def programs(self) -> list[dict[str, Program]]:
        """Per device of the machine its programs by name, written out."""
        found: list[dict[str, Program]] = [{} for _ in range(self.interface.world_size)]
        for name in FUNCTIONS:
            if all(name in own for own in self.roles):
                for program in bind([own[name] for own in self.roles]):
                    found[program.device][name] = program
        return found

    @cached_property
    def lanes(self) -> Sequence[Sequence[int]]:
        """Per copy of the computation its devices."""
        return self.interface.lanes or (range(self.interface.num_devices),)

    def file_of(self, device: int) -> Path:
        """The generated file that a device runs."""
        return self.files[place_of(self.interface, device)[1]]

    @cached_property
    def whole(self) -> Interface:
        """The interface of all devices."""
        return bound_interface(self.interface) if self.interface.lanes else self.interface

    @cached_property
    def stage_devices(self) -> dict[str, int]:
        """The device that holds each stage; the first of several."""
        return {stage: devices[0] for stage, devices in self.stage_holders.items()}

    @cached_property
    def stage_holders(self) -> dict[str, list[int]]:
        """All devices that hold each stage, or a shard of it, in their order."""
        found: dict[str, list[int]] = {}
        for role, programs in enumerate(self.roles):
            for stage in homes_of(programs["step"]):
                found.setdefault(stage, []).extend(lane[role] for lane in self.lanes)
        return {stage: sorted(devices) for stage, devices in found.items()}

    @cached_property
    def spread(self) -> dict[str, list[int]]:
        """The stages of which devices hold a shard each, with those devices that together hold one whole."""
        found: dict[str, list[int]] = {}
        for role, programs in enumerate(self.roles):
            for stage, home in homes_of(programs["step"]).items():
                if home.group:
                    found[stage] = members_of(self.interface, 0, role, home.group)
        return found

    def for_device(self, index: int) -> DeviceSetup:
        """The device's part. The driver adds how the device is reached, and its pace."""
        share = HostShare(
            gpu=self._gpu(index),
            num_threads=self.num_threads(index),
            dram_budget_bytes=self.dram_budget_bytes(index),
            ssd_dirs=tuple(self.ssd_dirs_of(self.hardware.devices[index].host)),
            ssd_verify=self.ssd_verify,
        )
        return DeviceSetup(
            index,
            self.file_of(index),
            self.interface,
            self.hardware,
            self.optimizer,
            self.precision,
            self.seed,
            self.timeout_s,
            share,
        )

    def ssd_dirs_of(self, host: int) -> list[str]:
        """Where the files of a host lie, one directory per SSD."""
        return list(self.ssd_dirs) or self.hardware.ssd_directories(host)

    @cached_property
    def shared_transfers(self) -> SharedTransfers:
        """Those which share links that are held down."""
        return shared_transfers(self.programs, self.hardware, self.precision)

    def num_threads(self, index: int) -> int:
        """What the hardware document says, but one where there are as many devices as cores; a GPU's share of cores."""
        device, cores = self.hardware.devices[index], os.cpu_count() or 1
        beside = sum(other.host == device.host for other in self.hardware.devices)
        if device.kind == "cuda":
            return max(1, cores // beside)
        return 1 if beside >= cores else min(device.threads, cores)

    def _gpu(self, index: int) -> int:
        """Its place among the GPUs of its host."""
        own = self.hardware.devices[index]
        return sum(d.kind == "cuda" and d.host == own.host for d in self.hardware.devices[:index])

    def dram_budget_bytes(self, index: int) -> int:
        """What the programs of the other devices on its host leave of the DRAM."""
        host = self.hardware.devices[index].host
        left = self.hardware.dram_budget_bytes(host)
        for role, programs in enumerate(self.roles):
            peak_bytes = max(profile_memory(program).peak_bytes[ops.DRAM] for program in programs.values())
            others = (lane[role] for lane in self.lanes if lane[role] != index)
            left -= peak_bytes * sum(self.hardware.devices[other].host == host for other in others)
        return max(left, 0)
