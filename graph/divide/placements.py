"""Placements: what each member of a team has of a value, and which exchange turns one placement into another.

A value is WHOLE (every member has the same), a PART (a member has its places along a dimension) or a SUMMAND (the sum
over members is the value); its gradient is one of the three, too. Where the reader of a value needs another placement
than the value has, one of the five `OPS` comes between. In backward the gradient goes the other way, from the placement
that the reader gives to the placement that the value needs, by the same table.
"""

from __future__ import annotations

import enum


class Has(enum.Enum):
    """A member's share of a value: all of it, a part, or a summand."""

    WHOLE = "whole"
    PART = "part"
    SUMMAND = "summand"


OPS: dict[tuple[Has, Has], str] = {  # from, to: the op of programs (`ir/ops/team.py`)
    (Has.WHOLE, Has.PART): "own_part",
    (Has.PART, Has.WHOLE): "gather_parts",
    (Has.PART, Has.PART): "all_to_all",  # along another dimension
    (Has.SUMMAND, Has.WHOLE): "sum_parts",
    (Has.SUMMAND, Has.PART): "scatter_sum",
}


class Placement(enum.Enum):
    """A member's share of a value, and of the value's gradient."""

    WHOLE = Has.WHOLE, Has.WHOLE  # all members do the same with it
    SHARED = Has.WHOLE, Has.SUMMAND  # each member uses it in its own way, so that gradients are added up
    PART = Has.PART, Has.PART
    SUMMAND = Has.SUMMAND, Has.WHOLE

    @property
    def forward(self) -> Has:
        return self.value[0]

    @property
    def backward(self) -> Has:
        return self.value[1]


def ops_between(now: Placement, needed: Placement) -> tuple[str, str]:
    """The ops that exchange a value and its gradient; "" where the value or the gradient is passed as it is."""

    def op(source: Has, result: Has) -> str:
        return "" if source is result is Has.WHOLE else OPS[source, result]

    return op(now.forward, needed.forward), op(needed.backward, now.backward)
