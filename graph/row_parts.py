"""Parts of a parameter's rows: how many are needed, where they begin, and the parameters that they become.

Tables (`tables/`) and matrices of experts (`experts/`) are parameters whose rows are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        "overlap or leave a gap"
    )


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
