"""Mappings: passes that decide which device runs each stage.

In: stages, each cut for a device. Out: `draft.devices`. A mapping keeps together what the partition gave to one device,
and exchanges only devices of equal speed and memory, so that every stage still fits where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ..base import Pass
from ..decisions import Decision
from ..draft import Draft

DEVICES = Decision("devices", list[int])  # stage -> device of its lane; mappings only exchange equal devices


@dataclass(frozen=True)
class Mapping(Pass):
    """Base of all mappings: they differ in `plan`."""

    needs: ClassVar[tuple[str, ...]] = ("stages",)
    gives: ClassVar[tuple[str, ...]] = ("devices",)
    rank: ClassVar[int] = 49
    decides: ClassVar[tuple[Decision, ...]] = (DEVICES,)

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return [self.name]

    def plan(self, draft: Draft) -> list[int]:
        raise NotImplementedError

    def rewrite(self, draft: Draft, decision: list[int]) -> None:
        if len(decision) != len(draft.partition):
            raise PassError(f"devices has {len(decision)} entries, there are {len(draft.partition)} stages")
        wrong = [d for d in decision if not 0 <= d < draft.lane_hardware.num_devices]
        if wrong:
            raise PassError(f"devices names device {wrong[0]}; there are 0 to {draft.lane_hardware.num_devices - 1}")
        draft.devices = list(decision)


def equal_devices(hardware: Hardware) -> list[list[int]]:
    """Devices that differ in nothing but their name and root complex, in order of their first member."""
    classes: dict[tuple[int, int], list[int]] = {}
    for index, (device, kind) in enumerate(zip(hardware.devices, hardware.device_kinds)):
        classes.setdefault((device.host, kind), []).append(index)
    return list(classes.values())
