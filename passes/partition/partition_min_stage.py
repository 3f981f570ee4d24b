"""`partition-min-stage`: one block a stage (Mobius 4.3, figure 9: "minimum-stage").

In: blocks with costs. Out: `draft.partition` and `draft.stages`. The devices take a block each in turn; one whose
memory does not hold the next block is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..draft import Draft
from .fill import fill_devices
from .partition import Partition, StagesDecision


@dataclass(frozen=True)
class PartitionMinStage(Partition):
    """`inputs_leave`: for pipelines that move what enters a stage to DRAM or SSD until its backward."""

    name: ClassVar[str] = "partition-min-stage"
    rank: ClassVar[int] = 32
    inputs_leave: bool = False

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where a block is larger than any device."""
        return fill_devices(draft, most_blocks=1, inputs_leave=self.inputs_leave)
