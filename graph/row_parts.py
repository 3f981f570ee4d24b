"""Parts of a parameter's rows: how many are needed, where they begin, and the parameters that they become.

Rows of tables (`tables/`), of matrices of experts (`experts/`) and of the weights of linear layers (`products/`) are
independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from ..ir.program import RowPart
from .opgraph import OpGraph, PartParam


def even_boundaries(rows: int, count: int) -> list[int]:
    """The places where parts of nearly equal size begin, and the number of rows."""
    return [rows * i // count for i in range(count + 1)]


def wrong_boundaries(begins: Sequence[int], rows: int) -> str:
    """The fault of the places where parts begin; empty where there is none."""
    if len(begins) >= 3 and [begins[0], begins[-1]] == [0, rows] and all(a < b for a, b in pairwise(begins)):
        return ""
    return (
        f"the first must begin at 0, each further one at a later row, and {rows} must end the list, so that no parts "
        f"overlap or leave a gap; nearest: {_nearest_boundaries(begins, rows)}"
    )


def _nearest_boundaries(begins: Sequence[int], rows: int) -> list[int]:
    """The same places in order, without those outside of the rows; two equal parts where none is left."""
    inside = sorted({row for row in begins if 0 < row < rows})
    return [0, *inside, rows] if inside else even_boundaries(rows, 2)


def part_name(name: str, begin: int, end: int) -> str:
    owner, _, leaf = name.rpartition(".")
    return f"{owner}[{begin}:{end}].{leaf}"


def add_part(graph: OpGraph, name: str, value: nn.Parameter, begin: int, end: int) -> str:
    """Make rows of a parameter a parameter of the graph, with its hooks. Returns its name."""
    part = part_name(name, begin, end)
    if part not in graph.parts:
        tensor = nn.Parameter(value.detach()[begin:end], requires_grad=value.requires_grad)
        graph.parts[part] = PartParam(RowPart(name, begin, end, value.shape[0]), tensor)
        if name in graph.hooks:
            graph.hooks[part] = graph.hooks[name]
    return part


def _bytes(graph: OpGraph, weight: nn.Parameter) -> tuple[int, int]:
    """Bytes of a weight, and of the sum of its gradients, if it is trained."""
    sums = graph.gradient_dtype(weight).itemsize if weight.requires_grad else 0
    return weight.numel() * graph.compute_dtype(weight).itemsize, weight.numel() * sums


def held_bytes(graph: OpGraph, weights: Iterable[nn.Parameter]) -> int:
    """Bytes of weights, of the sums of their gradients, and of what adds to the largest sum: a gradient, the same in
    the type of the sum, and a gap in the allocator's memory of that size."""
    rows = [_bytes(graph, weight) for weight in weights]
    added = [own + sums * (1 if own == sums else 2) for own, sums in rows if sums]
    return sum(own + sums for own, sums in rows) + max(added, default=0)
