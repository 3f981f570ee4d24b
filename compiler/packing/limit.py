"""Room for the documents of a micro-batch, of which a plan for GPUs knows no more than the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...graph.masks.forms import DocumentBorders
from ...ir.errors import BatchError
from ..plan import Plan


@dataclass(frozen=True)
class DocumentLimit:
    """At most `most` documents in a micro-batch, told apart by the input `positions`."""

    positions: str
    most: int

    @staticmethod
    def from_plan(plan: Plan) -> DocumentLimit | None:
        """The limit of a plan; None where its attention has room for all documents."""
        found = [form for form in plan.decisions.masks.values() if isinstance(form, DocumentBorders)]
        return DocumentLimit(found[0].positions, min(form.most for form in found)) if found else None

    def check(self, parts: Sequence[Tensor]) -> None:
        """Raises `BatchError` for a micro-batch with more documents, by its number; `parts`: the positions of each.
        Positions on a GPU are checked by the GPU, without a wait."""
        for number, positions in enumerate(parts):
            if positions.device.type != "cpu":
                continue
            count = int((positions.diff(dim=-1) != 1).sum()) + len(positions)
            if count > self.most:
                raise BatchError(
                    f"batch[{self.positions!r}] holds {count} documents in micro-batch {number}, where positions begin "
                    f"anew; the plan has room for {self.most}. Put fewer into a row, or compile with example_inputs "
                    "whose rows are as full: a plan has room for twice the documents of its example"
                )
