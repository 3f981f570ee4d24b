"""Passes over the op graph, which come before `coarsen` finds blocks in it.

In: `draft.graph`, which other candidates share. Out: another graph in its place that computes the same step; a rewrite
changes a copy (`copy_graph`), with the functions of `graph/edit.py` alone, which keep all edges between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..base import Pass, PlanSoFar
from ..draft import Draft


class GraphPass(Pass):
    """Base of passes that rewrite the op graph. A job can do without any of them."""

    rank: ClassVar[int] = 19
    label_rank: ClassVar[int] = 4
    precedes: ClassVar[tuple[str, ...]] = ("blocks",)

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return [] if self.everywhere and self == type(self)() else [self.text(short=True)]

    @classmethod
    def with_or_without(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        """Variants of a pass that saves memory: the best plan without it, or with it; none where devices keep all."""
        if not best.is_short:
            return []
        return [cls() if best.find(cls) is None else None]

    def divides(self, draft: Draft) -> bool:
        """Whether it would divide something that is large for a device, so that more models fit."""
        return False

    def must_divide(self, draft: Draft) -> bool:
        """Whether no plan fits without it."""
        return False

    def has_room(self, draft: Draft, times: float) -> bool:
        """Whether the rows of `times` micro-batches of the graph's size fit beside a part that it divides off."""
        return True
