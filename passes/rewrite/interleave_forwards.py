"""`interleave-forwards`: a model that a step calls several times is brought layer by layer, so that each of its
parameters is used in one place.

In: the op graph in recorded order, one forward after the other, as preference training (a policy and its reference),
distillation with one model, or towers with shared weights record them. Out: the same nodes in another order, layer k of
every forward one after the other. A stage then holds a layer of all forwards, and its weights are fetched once for all.
Only forwards that do not depend on each other are brought together: a layer that is applied again to its own result, or
an embedding that is also the head, stays where it is.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from torch import fx

from ...graph.edit import copy_graph, describe, erase
from ...graph.layers import buffers_of, is_in_list, is_inside, split_runs
from ...graph.opgraph import OpGraph, is_mode_switch
from ...ir.edges import reads, storage_root, written_roots
from ...ir.errors import PassError
from ...runtime.torch_names import enter_autocast, exit_autocast, set_grad_enabled
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass

LEAST_PARTS = 2  # a single part that is called twice (an embedding of encoder and decoder) is no forward of a model


@dataclass(frozen=True)
class InterleaveForwards(GraphPass):
    """It has no options."""

    name: ClassVar[str] = "interleave-forwards"
    rank: ClassVar[int] = 16
    everywhere: ClassVar[bool] = True
    # whether independent forwards of one model run layer by layer
    decides: ClassVar[tuple[Decision, ...]] = (Decision("interleaved", bool, False),)

    def plan(self, draft: Draft) -> bool:
        """Whether the step calls parts of the model several times, independently and in different places."""
        return bool(draft.graph.once(_places))

    def rewrite(self, draft: Draft, decision: bool) -> None:
        if not decision:
            return
        graph = copy_graph(draft.graph)
        places = _places(graph)
        if not places:
            raise PassError("interleaved is true, but this model has no part that independent forwards call in turn")
        _reorder(graph, _order(graph, places))
        names = list(dict.fromkeys(name for name, _ in places.values()))
        draft.notes[self.name] = f"{len(names)} parts, from {names[0]} to {names[-1]}, serve several forwards at once"
        draft.graph = graph


@dataclass
class _Group:
    """Nodes that use one parameter and do not depend on each other."""

    first: fx.Node
    members: int  # a bit per node


@dataclass
class _Uses:
    """The nodes that use parameters, and for each node those of them that it depends on."""

    graph: OpGraph
    by_parameter: dict[str, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    bit: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ties = self.graph.ties()
        for node in self.graph.nodes:
            users = list(node.users) if node.op == "get_attr" else [node]
            for name in self.graph.node_parameters(node):
                self.by_parameter[ties.get(name, name)] += users
        place = {node: i for i, node in enumerate(self.graph.nodes)}
        for name, nodes in self.by_parameter.items():
            self.by_parameter[name] = sorted(dict.fromkeys(nodes), key=place.__getitem__)
            for node in nodes:
                self.bit.setdefault(node, 1 << len(self.bit))

    @property
    def are_single(self) -> bool:
        return all(len(nodes) == 1 for nodes in self.by_parameter.values())

    def groups(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(first use, later use) for parameters that independent nodes use."""
        above: dict[fx.Node, int] = {}
        needs = _needs(self.graph)
        for node in self.graph.nodes:
            above[node] = 0
            for operand in needs[node]:
                above[node] |= above[operand] | self.bit.get(operand, 0)
        for nodes in self.by_parameter.values():
            groups: list[_Group] = []
            for node in nodes:
                group = next((g for g in groups if not g.members & above[node]), None)
                if group is None:
                    groups.append(_Group(node, self.bit[node]))
                else:
                    group.members |= self.bit[node]
                    yield group.first, node


def _places(graph: OpGraph) -> dict[fx.Node, tuple[str, int]]:
    """For each node that uses a parameter in another place than an earlier, independent one: the earlier one's part of
    the model and its number. Empty where there is nothing to bring together."""
    uses = _Uses(graph)
    if uses.are_single:
        return {}
    runs = split_runs(graph)
    run_of = {node: i for i, (_, nodes) in enumerate(runs) for node in nodes}
    found: dict[fx.Node, tuple[str, int]] = {}
    for first, later in uses.groups():
        if first in run_of and later in run_of and run_of[first] != run_of[later]:
            number = max(run_of[first], found[later][1] if later in found else 0)
            found[later] = runs[number][0], number
    return found if len({name for name, _ in found.values()}) >= LEAST_PARTS else {}


def _needs(graph: OpGraph) -> dict[fx.Node, set[fx.Node]]:
    """For each node those that must come before it: its operands, also in evaluation, and what writes or reads storage
    before it does the other."""
    found: dict[fx.Node, set[fx.Node]] = {}
    ties = graph.ties()
    last_write: dict[Any, fx.Node] = {}
    readers: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        operands = reads(node)
        needs = found[node] = set(operands)
        roots = {storage_root(n) for n in operands}
        touched: set[Any] = {n if n.op != "get_attr" else ties.get(str(n.target), str(n.target)) for n in roots}
        touched |= {ties.get(name, name) for name in buffers_of(graph, node)}
        written: set[Any] = {
            n if n.op != "get_attr" else ties.get(str(n.target), str(n.target)) for n in written_roots(node)
        }
        written |= {ties.get(name, name) for name in node.meta.get("updates_buffers", ())}
        needs |= {last_write[key] for key in touched | written if key in last_write}
        for key in written:
            needs.update(readers.pop(key, ()))
            last_write[key] = node
        for key in touched - written:
            readers[key].append(node)
        needs.discard(node)
    return found


def _order(graph: OpGraph, places: dict[fx.Node, tuple[str, int]]) -> list[fx.Node]:
    """The nodes, without switches of modes: those of a run that uses parameters again after the run that used them
    first, and everything after what it needs."""
    goal = _goals(graph, places)
    needs = _needs(graph)
    slot: dict[fx.Node, int] = {}
    for node in graph.nodes:
        slot[node] = 0 if node.op == "get_attr" else max(goal[node], *(slot[n] for n in needs[node]), 0)
    for node in graph.nodes:  # a weight is no value to send: it goes with its first reader
        if node.op == "get_attr":
            slot[node] = min((slot[user] for user in node.users), default=0)
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_mode_switch(n)]
    return sorted(inner, key=slot.__getitem__)  # a stable sort: recorded order within a slot


def _goals(graph: OpGraph, places: dict[fx.Node, tuple[str, int]]) -> dict[fx.Node, int]:
    """For each node the number of the run that it should be placed in. A node of no run, or between the elements of a
    list, goes with its first reader; a part of a value stays with the value."""
    own: dict[fx.Node, int] = {}
    between: set[fx.Node] = set()
    for number, (key, nodes) in enumerate(split_runs(graph)):
        earlier = min((places[node][1] for node in nodes if node in places), default=number)
        own.update({node: max(earlier, places[node][1] if node in places else 0) for node in nodes})
        if is_in_list(key):
            between.update(n for n in nodes if n not in places and not is_inside(key, n))
        else:  # of the model's own operations, the end of a forward and the begin of the next are in one run
            first = next((i for i, node in enumerate(nodes) if node in places), 0)
            between.update(nodes[:first])
            own.update({node: number for node in nodes[:first] if _reads_parameters(graph, node)})
    found: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        readers = [found[user] for user in node.users if user.op != "output"]
        is_part = node.target is operator.getitem
        is_free = node in between and not (is_part or _reads_parameters(graph, node))
        is_placed = node in own and (not is_free or not readers)
        found[node] = own[node] if is_placed else min(readers, default=0)
    return found


def _reads_parameters(graph: OpGraph, node: fx.Node) -> bool:
    return any(graph.node_parameters(n) for n in (node, *node.all_input_nodes) if n is node or n.op == "get_attr")


def _reorder(graph: OpGraph, order: list[fx.Node]) -> None:
    """Put the nodes in this order, with new switches of modes between them."""
    erase(graph, filter(is_mode_switch, graph.nodes))
    end = graph.graph.output_node()
    for node in order:
        end.prepend(node)
    for before, after in pairwise([None, *order, None]):
        _switch_grad(graph.graph, before, after)
    _switch_autocast(graph.graph, order)
    graph.rebuild()


def _is_off(node: fx.Node | None) -> bool:
    return node is not None and bool(node.meta["no_grad"])


def _switch_grad(graph: fx.Graph, before: fx.Node | None, node: fx.Node | None) -> None:
    if _is_off(before) != _is_off(node):
        with graph.inserting_before(node or graph.output_node()):
            _switch(graph, set_grad_enabled, (not _is_off(node),), node or before)


def _switch_autocast(graph: fx.Graph, order: list[fx.Node]) -> None:
    """One region for each run of nodes that were recorded in the same inner autocast."""
    entered: fx.Node | None = None
    for before, node in pairwise([None, *order, None]):
        old = before.meta["autocast"] if before is not None else None
        new = node.meta["autocast"] if node is not None else None
        if old == new:
            continue
        with graph.inserting_before(node or graph.output_node()):
            if entered is not None:
                _switch(graph, exit_autocast, (entered,), node or before)
            entered = None if new is None else _switch(graph, enter_autocast, new, node)


def _switch(graph: fx.Graph, function: Any, args: tuple[Any, ...], beside: fx.Node | None) -> fx.Node:
    assert beside is not None
    return describe(graph.call_function(function, args), beside, None)
