"""`map-everywhere`: every device runs all stages, each on its own share of the micro-batches.

In: stages. Out: `draft.devices`, with `EVERYWHERE` for each stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..runtime.errors import PassError
from .base import EVERYWHERE, Draft
from .mapping import Mapping


@dataclass(frozen=True)
class MapEverywhere(Mapping):
    name: ClassVar[str] = "map-everywhere"
    gives: ClassVar[tuple[str, ...]] = ("replicas",)

    def plan(self, draft: Draft) -> list[int]:
        return [EVERYWHERE] * len(draft.partition)

    def rewrite(self, draft: Draft, decision: list[int]) -> None:
        if decision != self.plan(draft):
            raise PassError(
                f"devices is {decision}; with map-everywhere it is {EVERYWHERE} for each of the "
                f"{len(draft.partition)} stages"
            )
        draft.devices = list(decision)
