"""Teams to try: lanes that share the tokens of every sequence, each a part (`split-context`).

A team divides the work of one row, which no other layout does. It sends activations inside every layer, so it is worth
a try where rows are long, or where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...passes.decisions import By
from ...passes.draft import Draft
from ...passes.graph.opgraph import OpGraph
from ...passes.graph.team.split_context import SplitContext
from ...passes.graph.tokens.facts import sequence_lengths
from ...passes.sharding.mesh import Mesh
from .candidate import Candidate

LONG_TOKENS = 8192  # of a row


def has_long_rows(graph: OpGraph) -> bool:
    """Whether rows are so long that a team may be worth its messages."""
    return not graph.sizes and max(sequence_lengths(graph), default=0) >= LONG_TOKENS


def team_meshes(hardware: Hardware) -> Iterator[tuple[int, Mesh]]:
    """Numbers of members and the meshes to try with them, the largest team first: with whole weights, and with weights
    spread over all devices."""
    count = hardware.num_devices
    for team in [n for n in range(count, 1, -1) if count % n == 0][:2]:
        yield team, Mesh(shards=count)
        yield team, Mesh()


def divided(base: Candidate, draft: Draft, team: int) -> Iterator[Candidate | PassError]:
    """The candidate with sequences divided among `team` members, in each way that the graph allows; for each that it
    does not, the reason. `draft` has the graph after the candidate's other passes over it."""
    for by in get_args(By):
        split = SplitContext(by, team)
        trial = Draft(draft.graph, draft.machine, draft.options)
        try:
            split.rewrite(trial, split.plan(trial))
        except PassError as error:
            yield error
        else:
            yield base.over(*base.graph_passes, split)
