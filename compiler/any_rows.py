"""One trace for every number of micro-batches, where their number is left to the search.

The first number that is asked for is traced; the others come from its tape (`capture/rows/`). A model that does
something else for other rows, or that cannot be followed, is traced for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph.opgraph import OpGraph
from ..ir.errors import CaptureError
from ..ir.program import Sizes
from .capture.rows.sizes import OtherTrace
from .dynamic_shapes import GraphAt

# What torch and a model's loss raise for sizes that they do not take; a trace of its own says where.
_REFUSALS = (OtherTrace, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


def any_rows(
    trace_rows: Callable[[int], OpGraph], trace: Callable[[int], OpGraph], inputs_at: Callable[[int], Any]
) -> GraphAt:
    """A function from a number of micro-batches to its graph. `trace_rows` traces so that sizes are followed; `trace`
    for one number alone."""
    first: list[Callable[[Any], OpGraph] | None] = []

    def at(count: int, other: Sizes | None = None) -> OpGraph:
        if not first:
            try:
                graph = trace_rows(count)
            except CaptureError:  # of the model itself, or of what is followed: a trace alone tells
                first.append(None)
                return trace(count)
            first.append(graph.at_inputs)
            graph.at_inputs = None
            return graph
        if first[0] is None:
            return trace(count)
        try:
            return first[0](inputs_at(count))
        except _REFUSALS:
            return trace(count)

    return at
