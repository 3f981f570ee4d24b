"""Rules about lanes with unequal numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .. import ops
from ..calls import op_of
from ..program import Program, share_of
from .case import fail


def smaller_lanes(programs: Sequence[Program]) -> list[list[Program]]:
    """Of programs for the lanes with the most micro-batches, those of the other lanes, by the number that they have."""
    interface = programs[0].interface
    if interface.micro_batches < max(interface.lane_micro_batches, default=0):
        return []
    return [share_of(programs, share) for share in interface.smaller_shares]


def check_meetings(most: Sequence[Program], smaller: Sequence[Program]) -> None:
    """Lanes with fewer micro-batches meet the others in the same collectives, in the same order."""
    for program, other in zip(most, smaller, strict=True):
        wanted, found = _meetings(program), _meetings(other)
        for i, node in enumerate(wanted):
            if i >= len(found) or _what(node) != _what(found[i]):
                share = other.interface.micro_batches
                fail(program, node, f"a lane of {share} micro-batches does not take part in this `{op_of(node).name}`")


def _meetings(program: Program) -> list[fx.Node]:
    """The collectives in which a lane meets lanes that may have other numbers of micro-batches."""
    return [node for node in program.ops() if node.kwargs.get("group") == ops.REPLICAS]


def _what(node: fx.Node) -> tuple[str, list[str]]:
    return op_of(node).name, [value.meta["type"].stage for value in node.all_input_nodes]
