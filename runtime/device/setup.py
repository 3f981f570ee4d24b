"""The plain data that is sent to a device's process to start it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...ir.machine.hardware import Device, Hardware
from ...ir.program import Interface, place_of
from ..optimizer.spec import OptimizerSpec
from ..source.trust import ONLY_VERIFIED, Trust
from ..ssd.extents import FileRange
from .file import DeviceFile, open_device_file
from .pacing import Paces

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class HostShare:
    """A device's share of its host. `gpu`: its number among the host's GPUs; `num_threads`: the threads of a CPU
    device's computation, None for those of the calling thread; `dram_budget_bytes`: None for all of the DRAM;
    `ssd_dirs`: the directories of its files, one per SSD; `ssd_verify` checks everything that is read from them;
    `hostname`: see `PeerLink`."""

    gpu: int = 0
    num_threads: int | None = None
    dram_budget_bytes: int | None = None
    ssd_dirs: tuple[str, ...] = ()
    ssd_verify: bool = False
    hostname: str | None = None


@dataclass(frozen=True)
class DeviceSetup:
    """Everything that one device needs to start. `file`: its generated file, a program of `interface`; `trust`: how far
    its other text may run. `compile_stages`: blocks are run by `torch.compile`. `stop_on_nan`: a step whose loss is not
    finite makes no update, where it can be undone. `in_files`: by stage and name, where the user's files have the bytes
    of frozen weights."""

    index: int
    file: Path
    interface: Interface
    hardware: Hardware
    optimizer: OptimizerSpec | None = None
    precision: str = "fp32"
    seed: int = 0
    timeout_s: float = TIMEOUT_S  # until a silent peer counts as lost
    share: HostShare = HostShare()
    paces: Paces = field(default_factory=Paces)
    trust: Trust = ONLY_VERIFIED
    compile_stages: bool = False
    stop_on_nan: bool = False
    in_files: Mapping[str, Mapping[str, FileRange]] = field(default_factory=dict)

    @property
    def spec(self) -> Device:
        """The device in the hardware document."""
        return self.hardware.devices[self.index]

    @property
    def dram_budget_bytes(self) -> int:
        given = self.share.dram_budget_bytes
        return self.hardware.dram_budget_bytes(self.spec.host) if given is None else given

    def open_file(self) -> DeviceFile:
        """See `open_device_file`."""
        return open_device_file(self.file, self.interface, place_of(self.interface, self.index)[1], self.trust)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "file": str(self.file),
            "interface": self.interface.to_json(),
            "hardware": self.hardware.model_dump(mode="json"),
            "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
            "share": asdict(self.share),
            "trust": asdict(self.trust),
            "paces": self.paces.to_json(),
            "in_files": {
                stage: {name: asdict(each) for name, each in row.items()} for stage, row in self.in_files.items()
            },
        }

    @staticmethod
    def from_json(raw: dict[str, Any]) -> DeviceSetup:
        typed = {
            "file": Path(raw["file"]),
            "interface": Interface.from_json(raw["interface"]),
            "hardware": Hardware.from_any(raw["hardware"]),
            "optimizer": None if raw["optimizer"] is None else OptimizerSpec.from_json(raw["optimizer"]),
            "share": HostShare(**{**raw["share"], "ssd_dirs": tuple(raw["share"]["ssd_dirs"])}),
            "trust": Trust.from_json(raw["trust"]),
            "paces": Paces.from_json(raw["paces"]),
            "in_files": {
                stage: {name: FileRange(**each) for name, each in row.items()}
                for stage, row in raw["in_files"].items()
            },
        }
        return DeviceSetup(**{**raw, **typed})
