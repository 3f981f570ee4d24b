"""Teams to try: lanes that share the tokens of every sequence, or the rows of every micro-batch (`split-context`).

A team divides the work of one row, which no other layout does. It sends activations inside every layer, so it is worth
a try where rows are long, or where nothing else fits. Members that share out experts each hold a part of them, and run
what would else be several micro-batches as one: so that is worth a try in a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from ...graph.follow.tokens import sequence_lengths
from ...graph.opgraph import OpGraph
from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...passes.decisions import By
from ...passes.draft import Draft
from ...passes.rewrite.split_context import SplitContext
from ...passes.sharding.mesh import Mesh
from ...runtime.experts.split_experts import part_product
from ...runtime.torch_names import grouped_mm
from .candidate import Candidate

LONG_TOKENS = 8192  # of a row


def has_long_rows(graph: OpGraph) -> bool:
    """Whether rows are so long that a team may be worth its messages."""
    return not graph.sizes and max(sequence_lengths(graph), default=0) >= LONG_TOKENS


def has_experts(graph: OpGraph) -> bool:
    """Whether products in groups make a team worth a try that shares out what they multiply by."""
    return any(node.target in (grouped_mm, part_product) for node in graph.nodes)


def team_meshes(hardware: Hardware) -> Iterator[tuple[int, Mesh]]:
    """Numbers of members and the meshes to try with them, the largest team first: with whole weights, and with weights
    spread over all devices."""
    count = hardware.num_devices
    for team in [n for n in range(count, 1, -1) if count % n == 0][:2]:
        yield team, Mesh(shards=count)
        yield team, Mesh()


def context_candidates(base: Candidate, draft: Draft, team: int, experts: bool) -> Iterator[Candidate | PassError]:
    """The candidate with sequences divided among `team` members, in each way that the graph allows; for each that it
    does not, the reason. `draft` has the graph after the candidate's other passes over it. `experts`: whether members
    share these out. A ring sends keys and values again for backward, or keeps them, which takes memory and spares
    links."""
    for by in get_args(By):
        split = SplitContext(by, team, experts)
        trial = Draft(draft.graph, draft.machine, draft.options)
        try:
            split.rewrite(trial, split.plan(trial))
        except PassError as error:
            yield error
        else:
            yield base.with_graph_passes(*base.graph_passes, split)
            if by == "ring":
                yield base.with_graph_passes(*base.graph_passes, replace(split, keep=True))
