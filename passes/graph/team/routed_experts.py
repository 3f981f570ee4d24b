"""Experts shared out among the members of a team that have different tokens: each token goes to its experts and back.

In: a layer of experts in an op graph of one member's tokens, which computes with all experts. Out: what one member
computes with its own experts. The members tell each other how many rows they have for each expert, and then each row (a
token for one of its experts) goes to the member that has the expert, and its result comes back: an all-to-all by count
(GShard, Lepikhin 2020, 3.2, without its capacity: no token is dropped). Weights of a token's experts are applied, and
their results added up, where the token is.

How many rows arrive is known only while it runs. Tensors have room for the most, all rows of all members, so that
shapes in stages do not depend on the routing; products end after the rows that came, and zeros follow them.
"""

from __future__ import annotations

from torch import fx

from ....runtime.expert_parts import arrived_offsets, expert_counts
from ..edit import GraphEdit
from ..experts.layers import ExpertLayer, is_of_rows
from ..experts.share import ExpertShare, replace_layers
from ..opgraph import OpGraph
from .exchanges import apart, from_experts, gather_alike, to_experts
from .local import LocalValues
from .member_experts import add_team_part


def refusal(layer: ExpertLayer, team: int) -> str:
    """Why a layer's experts stay with every member; empty where they can be divided."""
    if layer.refusal:
        return layer.refusal
    if layer.experts % team:
        near = [n for n in range(2, layer.experts + 1) if layer.experts % n == 0]
        return f"it has {layer.experts} experts, which {team} members cannot share evenly; teams that can: {near}"
    shared = next((node for node in layer.entering if not is_of_rows(node, layer.rows)), None)
    if shared is not None and shared.meta["val"].requires_grad:
        return f"{shared.name} ({shared.meta.get('source', '')}) meets rows of all tokens inside it"
    return ""


def route_experts(graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int, values: LocalValues) -> None:
    """Let a member compute its own experts' share of a layer, for the tokens of all. `member`: the input with its
    number."""
    before = GraphEdit(graph, layer.products[0])
    counts = before.call(gather_alike, before.call(expert_counts, layer.offsets), team, 0)
    sent = {
        node: before.call(to_experts, apart(before, node), team, counts)
        for node in layer.entering
        if is_of_rows(node, layer.rows)
    }
    share = _Routed(graph, layer, member, team, counts, sent, values)
    found = {n: share.call(from_experts, r, team, counts) for n, r in share.compute().items()}
    replace_layers(graph, [(layer, found)])


class _Routed(ExpertShare):
    """The experts of one member of a team, with the rows that all members have for them."""

    def __init__(
        self, graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int, counts: fx.Node,
        sent: dict[fx.Node, fx.Node], values: LocalValues,
    ):  # fmt: skip
        super().__init__(graph, layer, f"{layer.name}[/{team}]")
        self.team, self.sent, self.values = team, sent, values
        self.offsets = self.call(arrived_offsets, counts, member, team)  # first: the block begins here

    def parameter(self, whole: str) -> str:
        return add_team_part(self.graph, whole, self.layer.weights[whole], 0, self.team)

    def own_offsets(self) -> fx.Node:
        return self.offsets

    def own_rows(self, rows: fx.Node) -> fx.Node:
        return self.sent[rows]

    def _copied(self, node: fx.Node) -> fx.Node:
        copy = super()._copied(node)
        self.values.set(copy)
        return copy
