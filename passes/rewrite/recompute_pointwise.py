"""`recompute-pointwise`: backward computes pointwise results again instead of finding them saved.

In: the op graph. Out: the same graph with `pointwise_again` set, so that `coarsen` measures what blocks then save, and
stages run as `runtime.stage.pointwise` says. Activations, norms and casts that a model spells out call by call save
most of a transformer's bytes; to repeat them costs one more pass over memory. (Chen et al. 2016, "Training deep nets
with sublinear memory cost", 3: drop the results of cheap operations.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..base import Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass


@dataclass(frozen=True)
class RecomputePointwise(GraphPass):
    """It has no options."""

    name: ClassVar[str] = "recompute-pointwise"
    rank: ClassVar[int] = 14
    # whether backward computes pointwise results again
    decides: ClassVar[tuple[Decision, ...]] = (Decision("pointwise_again", bool, False, hashed=True),)

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        return cls.with_or_without(best)

    def plan(self, draft: Draft) -> bool:
        """True: that is what the pass is there for."""
        return True

    def rewrite(self, draft: Draft, decision: bool) -> None:
        draft.graph = dataclasses.replace(draft.graph, pointwise_again=decision)
