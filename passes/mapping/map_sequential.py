"""`map-sequential`: stages fill one root complex after the other, whatever its devices share (the baseline of Mobius
figure 10, "sequential mapping").

In: stages, each cut for a device. Out: `draft.devices`. Devices are exchanged among equal ones only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..draft import Draft
from .map_cross import complexes
from .mapping import Mapping, equal_devices


@dataclass(frozen=True)
class MapSequential(Mapping):
    name: ClassVar[str] = "map-sequential"
    rank: ClassVar[int] = 43

    def plan(self, draft: Draft) -> list[int]:
        homes = complexes(draft.lane_hardware)
        place: dict[int, int] = {}
        for group in equal_devices(draft.lane_hardware):
            in_use = [device for device in dict.fromkeys(draft.planned_for) if device in group]
            place.update(zip(in_use, sorted(group, key=lambda device: (homes[device], device))))
        return [place[device] for device in draft.planned_for]
