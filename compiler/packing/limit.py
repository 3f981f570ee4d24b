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
    def of(plan: Plan) -> DocumentLimit | None:
        """That of a plan; None where its attention has room for all."""
        found = [form for form in plan.decisions.masks.values() if isinstance(form, DocumentBorders)]
        return DocumentLimit(found[0].positions, min(form.most for form in found)) if found else None

    def check(self, parts: Sequence[Tensor]) -> None:
        """Raises `BatchError` for a micro-batch with more documents, by its number; `parts`: the positions of each.
        What lies on a GPU is left to the GPU, which is not waited for."""
        for number, positions in enumerate(parts):
            if positions.device.type != "cpu":
                continue
            count = int((positions.diff(dim=-1) != 1).sum()) + len(positions)
            if count > self.most:
                raise BatchError(
                    f"batch[{self.positions!r}] holds {count} documents in micro-batch {number}, where positions begin "
                    f"anew; the plan has room for {self.most}. Put fewer into a row, or compile with example_inputs "
                    "whose rows are as full: there is room for twice as many as they have"
                )
