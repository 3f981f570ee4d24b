"""Experts shared out among the members of a team: each has the same number of a layer's experts, and their rows.

In: a layer of experts in an op graph in which all members have the same tokens. Out: what one member computes. It takes
the rows of its own experts out of all, so that no token travels; what it gives has zeros for the rows of others. All
that is linear in this until each token has one value is done before members add up, so that tokens and not rows are
summed; in backward the same holds of what rows are gathered from.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from ...ir.program import TeamPart
from ...runtime.experts.split_experts import member_offsets, member_result, member_rows
from ..edit import GraphEdit, read_instead
from ..experts.layers import ExpertLayer
from ..experts.share import ExpertShare, replace_layers
from ..follow.linear import is_linear
from ..operators.calls import copied_operand
from ..operators.record import Elements
from ..opgraph import OpGraph, PartParam
from .exchanges import insert_exchange
from .placements import Placement


def divide_experts(graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int) -> None:
    """Let a member compute its experts' share of a layer. `member`: the input with its number."""
    for node in layer.entering:
        _share_source(graph, layer, node, team)
    part = _Member(graph, layer, member, team)
    found = {n: part.call(member_result, r, layer.offsets, member, team) for n, r in part.compute().items()}
    replace_layers(graph, [(layer, found)])
    for result in found.values():
        _sum_of_tokens(graph, result, team)


class _Member(ExpertShare):
    """The experts of one member of a team."""

    def __init__(self, graph: OpGraph, layer: ExpertLayer, member: fx.Node, team: int):
        super().__init__(graph, layer, f"{layer.name}[/{team}]")
        self.member, self.team = member, team

    def parameter(self, whole: str) -> str:
        return add_team_part(self.graph, whole, self.layer.weights[whole], 0, self.team)

    def own_offsets(self) -> fx.Node:
        return self.call(member_offsets, self.layer.offsets, self.member, self.team)

    def own_rows(self, rows: fx.Node) -> fx.Node:
        return self.call(member_rows, rows, self.layer.offsets, self.member, self.team)


def add_team_part(graph: OpGraph, name: str, whole: nn.Parameter, dim: int, team: int, blocks: int = 1) -> str:
    """Make what a member has of a parameter a parameter of the graph, with its hooks. Returns its name."""
    shape = list(whole.shape)
    shape[dim] //= team
    owner, _, leaf = name.rpartition(".")
    part = f"{owner}[/{team}].{leaf}"
    tensor = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), requires_grad=whole.requires_grad)
    graph.parts[part] = PartParam(TeamPart(name, dim, team, blocks), tensor)
    if name in graph.hooks:
        graph.hooks[part] = graph.hooks[name]
    return part


def _share_source(graph: OpGraph, layer: ExpertLayer, node: fx.Node, team: int) -> None:
    """Let the gradient of what enters a layer be added up over members: where rows are gathered, that of the tokens.
    What reads the same value outside of the layer has its whole gradient already."""
    if not node.meta["val"].requires_grad:
        return
    readers, source = [user for user in node.users if user in layer.inside], node
    while len(source.users) == 1 and (before := _linear_in(graph, source)) is not None:
        if any(other.meta["val"].requires_grad for other in source.all_input_nodes if other is not before):
            break
        readers, source = [source], before
    shared = insert_exchange(GraphEdit(graph, readers[0]), source, Placement.WHOLE, Placement.SHARED, team)
    for reader in readers:
        read_instead(reader, {source: shared})


def _sum_of_tokens(graph: OpGraph, node: fx.Node, team: int) -> None:
    """Add up over members what is made of their rows, once each token has one value."""
    best = node
    while len(node.users) == 1:
        (user,) = node.users
        if _linear_in(graph, user) is not node:
            break
        for factor in user.all_input_nodes:
            if factor is not node and factor.meta["val"].requires_grad:
                shared = insert_exchange(GraphEdit(graph, user), factor, Placement.WHOLE, Placement.SHARED, team)
                read_instead(user, {factor: shared})
        node = user
        if node.meta["val"].numel() <= best.meta["val"].numel():
            best = node
    after = next(iter(best.users))
    edit = GraphEdit(graph, after)
    edit.path = str(best.meta["module_path"])
    users = list(best.users)
    summed = insert_exchange(edit, best, Placement.SUMMAND, Placement.WHOLE, team)
    for user in users:
        read_instead(user, {best: summed})


def _linear_in(graph: OpGraph, node: fx.Node) -> fx.Node | None:
    """The operand in which a call is linear, with all others as they are; None where none is known."""
    first = node.args[0] if node.args else None
    is_call = node.op != "call_module" and not node.meta.get("random") and not node.meta["mutates"]
    if not isinstance(first, fx.Node) or not is_call or not is_linear(graph, node, (first,)):
        return None
    is_cast = copied_operand(graph, node, Elements.SAME) and node.meta["val"].dtype != first.meta["val"].dtype
    return None if is_cast else first
