"""Exchanges in an op graph: where the members of a team make one value of another, and stages are therefore cut.

In: graph passes write calls of the functions below. Out: values of stages (`Exchange`), between which programs have ops
of `ir/ops/team.py`. The nodes after such a call have the shapes of one member. A node that reads what is exchanged,
before or after, begins a block, and a stage; the calls themselves are in no block.

Each function stands for the team with `team` copies of the value at hand: only shapes, types and whether there is a
gradient matter, as no stage holds the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.program import Exchange, TensorSpec
from ...runtime.functions import attend_block, attention_of, with_gradients
from ...runtime.torch_names import FakeTensor
from ..dataflow import Dataflow
from ..edit import GraphEdit, describe, replace_uses
from ..opgraph import OpGraph, value_tensors
from .placements import Placement, ops_between

WHOLE, SHARED, PART, SUMMAND = Placement
MEMBER = "team_member"  # the input that has a device's number in its team


def all_to_all(value: Tensor, team: int, split_dim: int, concat_dim: int) -> Tensor:
    """Each member's part along `split_dim`, of all members one after the other along `concat_dim`."""
    return torch.cat([value.chunk(team, split_dim)[0]] * team, concat_dim)


def gather_parts(value: Tensor, team: int, dim: int) -> Tensor:
    """All members' parts, whose readers differ from member to member: gradients are added up."""
    return torch.cat([value] * team, dim)


def gather_alike(value: Tensor, team: int, dim: int) -> Tensor:
    """All members' parts, where all members do the same with them: each has the gradient of its own part."""
    return torch.cat([value] * team, dim)


def scatter_sum(value: Tensor, team: int, dim: int) -> Tensor:
    """A member's part of the sum over members."""
    return value.chunk(team, dim)[0].clone()


def sum_parts(value: Tensor, team: int) -> Tensor:
    """The sum over members, with which all of them do the same."""
    return value * 1


def add_up(value: Tensor, team: int) -> Tensor:
    """The sum over members, with each of which the loss may grow in its own way: so gradients are added up, too."""
    return value * 1


def share(value: Tensor, team: int) -> Tensor:
    """Share a value that all members have alike and use differently: the gradients of all of them are added up."""
    return value * 1


def share_weight(value: Tensor, team: int) -> Tensor:
    """A weight that members read beside parts of a region, after the exchange with which it begins: the gradients of
    all of them are added up. Its reader begins no block, as the region does."""
    return value * 1


def own_part(value: Tensor, team: int, dim: int) -> Tensor:
    """A member's part of what all of them have alike."""
    return value.chunk(team, dim)[0].clone()


def pass_on(value: Tensor, team: int, lasts: bool = False) -> Tensor:
    """The value of the member before, in a ring. Backward is given it anew unless it `lasts` until then."""
    return value * 1


def to_experts(value: Tensor, team: int, routes: Tensor, experts: int) -> Tensor:
    """The rows of a member's experts, out of the tokens of all members. `routes`: to which of the `experts` each of
    these tokens goes."""
    return torch.cat([value] * (team * routes.shape[1]))


def from_experts(value: Tensor, team: int, routes: Tensor, experts: int) -> Tensor:
    """For each token of a member the sum over the rows that all members have of it."""
    return value.chunk(team * routes.shape[1])[0].clone()


@dataclass(frozen=True)
class ExchangeOps:
    """The ops of a call and of its gradient; "" where the value is passed as it is. `dims`: the names of the call's
    numbers as fields of the op; `back_dims`: which of them are those of the op for gradients, in its order."""

    op: str
    back: str
    dims: tuple[str, ...] = ()
    back_dims: tuple[int, ...] = (0,)


# The placements before and after each exchange; where several have the same, the first is for values.
PLACEMENTS: dict[Callable[..., Any], tuple[Placement, Placement]] = {
    all_to_all: (PART, PART),
    gather_parts: (PART, SHARED),
    gather_alike: (PART, WHOLE),
    scatter_sum: (SUMMAND, PART),
    sum_parts: (SUMMAND, WHOLE),
    add_up: (SUMMAND, SHARED),
    share: (WHOLE, SHARED),
    share_weight: (WHOLE, SHARED),
    own_part: (WHOLE, PART),
}
DIMS = {"all_to_all": ("split_dim", "concat_dim"), "sum_parts": (), "": ()}  # of an op's fields; else `dim`


def _ops_of(function: Callable[..., Any]) -> ExchangeOps:
    op, back = ops_between(*PLACEMENTS[function])
    dims = DIMS.get(op, ("dim",))
    return ExchangeOps(op, back, dims, (1, 0) if len(dims) == 2 else (0,))


EXCHANGES: dict[Callable[..., Any], ExchangeOps] = {
    **{function: _ops_of(function) for function in PLACEMENTS},
    pass_on: ExchangeOps("pass_on", "pass_on"),
    to_experts: ExchangeOps("to_experts", "from_experts", ("experts",)),
    from_experts: ExchangeOps("from_experts", "to_experts", ("experts",)),
}
_BETWEEN = {between: function for function, between in reversed(PLACEMENTS.items())}


def insert_exchange(
    edit: GraphEdit, value: fx.Node, now: Placement, needed: Placement, team: int, *dims: int
) -> fx.Node:
    """Write the exchange that gives a value the placement which its reader needs. `dims`: along which members have
    parts, before and after. The result of another exchange is copied first, in a stage between the two."""
    value = edit.call(torch.clone, value) if is_exchange(value) else value
    return edit.call(_BETWEEN[now, needed], value, team, *dims)


def copy_written_results(graph: OpGraph) -> None:
    """Let nodes that write the result of an exchange write a copy of it: the result enters a stage, which cannot write
    what it is given."""
    flow = Dataflow(graph.nodes)
    for result in [node for node in graph.nodes if is_exchange(node) and flow.writers(node)]:
        copy = GraphEdit(graph, result, after=True).call(torch.clone, result)
        replace_uses(graph, {result: copy})


def member_input(graph: OpGraph) -> fx.Node:
    """The input of the graph that has the device's number in its team: [1], int64; written where there is none."""
    known = next((n for n in graph.nodes if n.op == "placeholder" and n.target == MEMBER), None)
    if known is not None:
        return known
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    with graph.graph.inserting_after(last):
        node = graph.graph.placeholder(MEMBER)
    fake_mode = next(t.fake_mode for t in value_tensors(last.meta["val"]) if isinstance(t, FakeTensor))
    with fake_mode:
        value = torch.zeros(1, dtype=torch.int64)
    return describe(node, last, value, source="")


def is_exchange(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in EXCHANGES


def partial_before(node: fx.Node) -> fx.Node | None:
    """The partial attention before a ring's block, whose gradient is that of this node as it is."""
    block = node.args[0] if node.target is with_gradients else None
    before = block.args[0] if isinstance(block, fx.Node) else None
    return before if isinstance(before, fx.Node) else None


def hands_back(node: fx.Node) -> list[fx.Node]:
    """The partial attentions with one more block, whose gradients are that of this node as they are."""
    blocks = (user for user in node.users if user.target is attend_block and user.args[0] is node)
    return [user for block in blocks for user in block.users if partial_before(user) is node]


def source_of(node: fx.Node) -> fx.Node:
    """The value of which an exchange is made."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def routes_of(node: fx.Node) -> fx.Node | None:
    """The exchanged value that says which tokens go where, for an exchange by count."""
    return next((arg for arg in node.args[2:] if isinstance(arg, fx.Node)), None)


def exchanges_of(value: fx.Node) -> list[fx.Node]:
    """The exchanges that are made of a value."""
    return [user for user in value.users if is_exchange(user) and source_of(user) is value]


def borders(node: fx.Node) -> set[fx.Node]:
    """The values that a node reads where a block has to begin: those that are exchanged, before or after their
    exchange, and what a ring has made, so that backward needs nothing of its last block but this."""
    read = {arg for arg in node.all_input_nodes if is_exchange(arg) or exchanges_of(arg)}
    if node.target is attention_of:
        read.update(node.all_input_nodes)
    return {_first_of(arg) for arg in read if arg.target is not share_weight}


def _first_of(value: fx.Node) -> fx.Node:
    """The first of the values that come by the same routes, one right after another, where one border is enough."""
    routes = routes_of(value) if is_exchange(value) else None
    if routes is None or value.target is to_experts:
        return routes or value
    return next(user for user in routes.users if user.target is value.target)


def exchange(node: fx.Node, result: TensorSpec) -> Exchange:
    """A call as programs know it. `result`: what it makes."""
    kind = EXCHANGES[node.target]  # type: ignore[index]
    routes = routes_of(node)
    dims = [int(arg) for arg in node.args[2:] if arg is not routes]  # type: ignore[arg-type]
    fields = tuple(zip(kind.dims, dims))
    back_fields = tuple(zip(kind.dims, [dims[i] for i in kind.back_dims])) if kind.back and dims else ()
    if kind.back == "pass_on":
        back_fields = (("back", 1),)
    routed = "" if routes is None else routes.name
    lasts = bool(node.kwargs.get("lasts", False))
    return Exchange(result, source_of(node).name, kind.op, fields, kind.back, back_fields, routed, lasts)


def cut_at_borders(blocks: Iterable[tuple[str, Iterable[fx.Node]]]) -> list[list[str]]:
    """The runs of blocks (name, nodes) that may be one stage: none reads what a block of it, or what came before that,
    exchanges with other members, but at its beginning."""
    found: list[list[str]] = []
    seen: set[fx.Node] = set()
    for name, nodes in blocks:
        read = set[fx.Node]().union(*map(borders, nodes))
        if not found or read - seen:
            found.append([])
            seen = set()
        found[-1].append(name)
        seen |= read
    return found
