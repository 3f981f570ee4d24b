"""`map-round-robin`: stage j runs on device j mod N (Mobius 3.1, figure 4).

In: stages. Out: `draft.devices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..runtime.errors import PassError
from .base import Draft, Pass


@dataclass(frozen=True)
class MapRoundRobin(Pass):
    name: ClassVar[str] = "map-round-robin"
    needs: ClassVar[tuple[str, ...]] = ("stages",)
    gives: ClassVar[tuple[str, ...]] = ("devices",)
    decides: ClassVar[str] = "devices"

    def plan(self, draft: Draft) -> list[int]:
        return [index % draft.hardware.num_devices for index in range(len(draft.partition))]

    def rewrite(self, draft: Draft, decision: list[int]) -> None:
        if len(decision) != len(draft.partition):
            raise PassError(f"devices has {len(decision)} entries, there are {len(draft.partition)} stages")
        wrong = [d for d in decision if not 0 <= d < draft.hardware.num_devices]
        if wrong:
            raise PassError(f"devices names device {wrong[0]}; there are 0 to {draft.hardware.num_devices - 1}")
        draft.devices = list(decision)
