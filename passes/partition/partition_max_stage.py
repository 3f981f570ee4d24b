"""`partition-max-stage`: the fewest and largest stages that fit (Mobius 4.3, figure 9: "maximum-stage").

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Device after device takes the most next blocks that
its memory holds with their gradients, one rematerialised micro-batch and all micro-batches' inputs, those of its
other stages too. A model that fits one device therefore runs there alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..draft import Draft
from .fill import fill_devices
from .partition import Partition, StagesDecision


@dataclass(frozen=True)
class PartitionMaxStage(Partition):
    """`inputs_leave`: for pipelines that move what enters a stage to DRAM or SSD until its backward."""

    name: ClassVar[str] = "partition-max-stage"
    rank: ClassVar[int] = 31
    inputs_leave: bool = False

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where a block is larger than any device."""
        return fill_devices(draft, inputs_leave=self.inputs_leave)
