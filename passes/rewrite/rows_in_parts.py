"""Passes that make parts of a parameter's rows: their base, the room of a part, and optimizers that take no parts.

Each part is a parameter and a block of its own, so that a partitioner may put parts into several stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ...ir.errors import PassError
from ..draft import Draft
from .graph_pass import GraphPass

COPIES = 3  # of a table that is trained: the weights, their gradient, and the gradient that is added to it
SHARE = 0.5  # of a device's memory that a part takes at most, so that another stage has room beside it
RowBoundaries = dict[str, list[int]]  # what is split -> 0, the first row of each further part, the number of rows


@dataclass(frozen=True)
class RowsInParts(GraphPass):
    """Base of passes that make parts of rows. `parts`: of everything that can be split, or automatic: of what is large
    for a device."""

    automatic: ClassVar[tuple[str, ...]] = ("parts",)
    parts: int = 0

    def look(self, draft: Draft) -> tuple[RowBoundaries, list[str]]:
        """The rows to split, and the reasons why others cannot be split."""
        raise NotImplementedError

    def lacks(self, draft: Draft) -> str:
        """The reason why nothing is split where `look` gives none."""
        raise NotImplementedError

    def divides(self, draft: Draft) -> bool:
        return bool(self.look(draft)[0])

    def plan(self, draft: Draft) -> RowBoundaries:
        """Raises `PassError` where `parts` is given and nothing can have this number."""
        found, refused = self.look(draft)
        if refused:
            draft.notes[self.name] = "; ".join(refused)
        if self.parts > 1 and not found:
            raise PassError(f"{self.name}: {'; '.join(refused) or self.lacks(draft)}")
        return found

    def tell(self, draft: Draft, made: Sequence[str]) -> None:
        """Add what the pass has made to its remark in the plan."""
        draft.notes[self.name] = "; ".join([*filter(None, [draft.notes.get(self.name)]), *made])


def device_room(draft: Draft) -> int:
    """The bytes of the smallest device; one of a device without any, so that a share of them is more than none."""
    return max(1, min(device.budget_bytes for device in draft.machine.devices))


def refused_by_optimizer(draft: Draft, name: str, value: nn.Parameter) -> str:
    """The reason why the optimizer needs the whole parameter; empty where it does not."""
    whole = draft.options.takes_whole
    if whole is None or not value.requires_grad or not whole(name):
        return ""
    return "its optimizer looks at whole parameters, not at each element; torch.optim.AdamW would do"


def few(names: Sequence[str], one: str = "stays", several: str = "stay") -> str:
    """The first of the names, and the number of the others."""
    return f"{names[0]} {one}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more {several}"
