"""`map-round-robin`: every stage runs on the device that it was cut for; stage j of a contiguous partition on device
j mod N (Mobius 3.1, figure 4).

In: stages. Out: `draft.devices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..draft import Draft
from .mapping import Mapping


@dataclass(frozen=True)
class MapRoundRobin(Mapping):
    name: ClassVar[str] = "map-round-robin"
    rank: ClassVar[int] = 41

    def plan(self, draft: Draft) -> list[int]:
        return list(draft.planned_for)
