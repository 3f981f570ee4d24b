"""The best of the evaluations so far, and when to stop for want of better ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOWER_IS_BETTER = {"loss": True, "accuracy": False}


@dataclass
class BestSoFar:
    """`by`: the figure that decides. `patience`: the number of evaluations without a better one that ends the run; 0:
    none does."""

    by: str = "loss"
    patience: int = 0
    value: float | None = None
    step: int = 0
    misses: int = 0

    def is_better(self, metrics: Mapping[str, float], step: int) -> bool:
        """Whether these figures are the best so far, which is remembered."""
        found = metrics[self.by]
        better = not math.isnan(found) and (
            self.value is None or (found < self.value if LOWER_IS_BETTER[self.by] else found > self.value)
        )
        self.misses = 0 if better else self.misses + 1
        if better:
            self.value, self.step = found, step
        return better

    @property
    def is_over(self) -> bool:
        return self.patience > 0 and self.misses >= self.patience

    def state(self) -> dict[str, Any]:
        return {"by": self.by, "value": self.value, "step": self.step, "misses": self.misses}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; another figure begins anew."""
        if state.get("by") == self.by:
            self.value, self.step, self.misses = state["value"], state["step"], state["misses"]
