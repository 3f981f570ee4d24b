"""The setup that a training script sends to its devices before they start, and the facts in the files that they will
run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import (
    Interface,
    Program,
    TeamPart,
    bind,
    bound_interface,
    homes_of,
    members_of,
    parse_program,
    place_of,
    profile_memory,
    takes_turns,
)
from ..device.file import share_file
from ..device.setup import TIMEOUT_S, DeviceSetup, HostShare
from ..emulate.throttle import SharedTransfers, shared_transfers
from ..optimizer.stage_optimizer import OptimizerSpec
from ..source.file import FUNCTIONS
from ..source.trust import ONLY_VERIFIED, Trust
from ..ssd.extents import FileRange


@dataclass(frozen=True)
class RunSetup:
    """Everything that the devices need to start. `files` has one generated file per device of a lane, in their order.

    `ssd_dirs` are directories for files, one per SSD, the same on every host; by default each host's own in the
    hardware document. `ssd_verify` checks everything that is read from SSD. `trust`: how far the files may run.
    `compile_stages`: blocks are run by `torch.compile`. `stop_on_nan`, `in_files`: see `DeviceSetup`.
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
    trust: Trust = ONLY_VERIFIED
    compile_stages: bool = False
    stop_on_nan: bool = False
    in_files: Mapping[str, Mapping[str, FileRange]] = field(default_factory=dict)

    @cached_property
    def roles(self) -> list[dict[str, Program]]:
        """For each device of a lane, its programs by name, read from the files."""
        return [self._read(path, role) for role, path in enumerate(self.files)]

    def _read(self, path: Path, role: int) -> dict[str, Program]:
        text = Path(path).read_text()
        names = [name for name in FUNCTIONS if f"def {name}(rt, batch)" in text]
        return {name: parse_program(text, self.interface, role, name) for name in names}

    def programs_of(self, device: int) -> dict[str, Program]:
        """The programs of the file that a device runs, by name, as they are there."""
        path, (_, role) = self.file_of(device), place_of(self.interface, device)
        return self.roles[role] if path == self.files[role] else self._read(path, role)

    @cached_property
    def programs(self) -> list[dict[str, Program]]:
        """For each device of the machine, its programs by name, written out from those of the lane."""
        found: list[dict[str, Program]] = [{} for _ in range(self.interface.world_size)]
        for name in FUNCTIONS:
            if all(name in own for own in self.roles):
                for program in bind([own[name] for own in self.roles]):
                    found[program.device][name] = program
        return found

    @cached_property
    def takes_turns(self) -> bool:
        """Whether fetches of some device wait for their turns on a link."""
        return any(takes_turns(program) for programs in self.roles for program in programs.values())

    @cached_property
    def lanes(self) -> Sequence[Sequence[int]]:
        """For each lane, its devices."""
        return self.interface.lanes or (range(self.interface.num_devices),)

    def file_of(self, device: int) -> Path:
        """The generated file that a device runs."""
        lane, role = place_of(self.interface, device)
        return share_file(Path(self.files[role]), self.interface, self.interface.micro_batches_of(lane))

    @property
    def all_files(self) -> list[Path]:
        """The generated files of all lanes, also of those that have fewer micro-batches than others."""
        shares = [self.interface.micro_batches, *self.interface.smaller_shares]
        return [share_file(Path(path), self.interface, share) for share in shares for path in self.files]

    @cached_property
    def whole(self) -> Interface:
        """The interface of the whole machine, with all lanes."""
        return bound_interface(self.interface) if self.interface.lanes else self.interface

    @cached_property
    def stage_devices(self) -> dict[str, int]:
        """The first device that holds each stage."""
        return {stage: devices[0] for stage, devices in self.stage_holders.items()}

    @cached_property
    def stage_holders(self) -> dict[str, list[int]]:
        """For each stage, all devices that hold it or a shard of it, in order."""
        found: dict[str, list[int]] = {}
        for role, programs in enumerate(self.roles):
            for stage in homes_of(programs["step"]):
                found.setdefault(stage, []).extend(lane[role] for lane in self.lanes)
        return {stage: sorted(devices) for stage, devices in found.items()}

    @cached_property
    def spread(self) -> dict[str, list[int]]:
        """The stages of which no device has all, each with the devices whose shards, or whose members' parts, make one
        whole stage: all shards of the first member's part, then those of the next."""
        found = dict(self.stages_in_parts)
        for role, programs in enumerate(self.roles):
            for stage, home in homes_of(programs["step"]).items():
                lanes = range(self.interface.team if stage in self.stages_in_parts else 1)
                if home.group:
                    found[stage] = [d for lane in lanes for d in members_of(self.interface, lane, role, home.group)]
        return found

    @cached_property
    def stages_in_parts(self) -> dict[str, list[int]]:
        """The stages of which members of a team have parts, each with the devices of the first team that hold it."""
        found: dict[str, list[int]] = {}
        for role, programs in enumerate(self.roles):
            for stage in homes_of(programs["step"]):
                if any(isinstance(param.part, TeamPart) for param in self.interface.stages[stage].params):
                    found[stage] = members_of(self.interface, 0, role, ops.TEAM)
        return found

    def for_device(self, index: int) -> DeviceSetup:
        """The setup of one device. The driver adds the device's address and its pace."""
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
            trust=self.trust,
            compile_stages=self.compile_stages,
            stop_on_nan=self.stop_on_nan,
            in_files=self.in_files,
        )

    def ssd_dirs_of(self, host: int) -> list[str]:
        """The directories for a host's files, one per SSD."""
        return list(self.ssd_dirs) or self.hardware.ssd_directories(host)

    @property
    def all_ssd_dirs(self) -> list[str]:
        """The directories for files of all hosts, each once."""
        hosts = range(len(self.hardware.hosts))
        return list(dict.fromkeys(directory for host in hosts for directory in self.ssd_dirs_of(host)))

    @cached_property
    def shared_transfers(self) -> SharedTransfers:
        """The transfers that share throttled links."""
        return shared_transfers(self.programs, self.hardware, self.precision)

    def num_threads(self, index: int) -> int:
        """The number of CPU threads of a device: the document's, but 1 if its host has no more cores than devices; for
        a GPU, its share of the cores."""
        device, cores = self.hardware.devices[index], os.cpu_count() or 1
        beside = sum(other.host == device.host for other in self.hardware.devices)
        if device.kind == "cuda":
            return max(1, cores // beside)
        return 1 if beside >= cores else min(device.threads, cores)

    def _gpu(self, index: int) -> int:
        """The number of a GPU among the GPUs of its host."""
        own = self.hardware.devices[index]
        return sum(d.kind == "cuda" and d.host == own.host for d in self.hardware.devices[:index])

    def free_dram_bytes(self, host: int) -> int:
        """The bytes of a host's DRAM that the programs of all its devices leave at their peaks."""
        index = next(i for i, device in enumerate(self.hardware.devices) if device.host == host)
        _, role = place_of(self.interface, index)
        peaks = [profile_memory(program).peak_bytes[ops.DRAM] for program in self.roles[role].values()]
        return self.dram_budget_bytes(index) - max(peaks)

    def dram_budget_bytes(self, index: int) -> int:
        """The bytes of DRAM that the programs of the other devices on the same host leave."""
        host = self.hardware.devices[index].host
        left = self.hardware.dram_budget_bytes(host)
        for role, programs in enumerate(self.roles):
            peak_bytes = max(profile_memory(program).peak_bytes[ops.DRAM] for program in programs.values())
            others = (lane[role] for lane in self.lanes if lane[role] != index)
            left -= peak_bytes * sum(self.hardware.devices[other].host == host for other in others)
        return max(left, 0)
