"""The part of the op graph that counts: from the batch's inputs to a number, cut out as graphs of their own.

In: nodes of the op graph, or what a cross entropy divides by. Out: one graph from the rows of one micro-batch to
numbers that are added up over the batch (`Totals`), and one from those numbers to the divisors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...ir.calls import call_name
from ..dataflow import Dataflow, shared_nodes
from ..edit import describe
from ..follow.engine import keeps_rows_apart
from ..follow.linear import is_scalar, reduction_of
from ..loss_terms import NUM_ITEMS
from ..operators.calls import copied_operand
from ..operators.record import Elements
from ..opgraph import OpGraph

_KEEP = (torch.int64, torch.float32, torch.float64)  # dtypes that hold a count as it is


@dataclass(frozen=True)
class Targets:
    """The divisor of the mean of a cross entropy: the targets other than `ignored`, or their class weights."""

    node: fx.Node
    ignored: int
    weight: fx.Node | None = None


@dataclass(frozen=True)
class Total:
    """A number that is summed over the batch, or averaged: of a reduction in the user's graph, or of targets."""

    of: fx.Node | Targets
    is_mean: bool = False


@dataclass
class BatchView:
    """The nodes of a graph that depend on the batch, and on nothing that training changes."""

    graph: OpGraph
    rows: int | None  # of a micro-batch; None for a batch that is never cut
    shared: set[fx.Node] = field(default_factory=set)
    dependent: set[fx.Node] = field(default_factory=set)
    flow: Dataflow = field(init=False)

    @staticmethod
    def build(graph: OpGraph, rows: int | None) -> BatchView:
        view = BatchView(graph, rows, shared_nodes(graph))
        view.flow = Dataflow(graph.nodes)
        view.dependent = view.flow.descendants(node for node in graph.nodes if node.op == "placeholder")
        view.dependent |= {n for root, writers in view.flow.written_by.items() for n in (root, *writers)}
        return view

    def depends(self, node: Any) -> bool:
        """Whether a value depends on the batch; numbers, parameters and constants do not."""
        return isinstance(node, fx.Node) and node in self.dependent

    def is_known(self, node: Any) -> bool:
        """Whether a value can be computed from the batch alone, before the step."""
        return not isinstance(node, fx.Node) or node in self.shared

    def keeps_rows_apart(self, node: fx.Node) -> bool:
        """Whether a value has nothing in which rows of the batch meet: a sum over it is then the sum of its parts'."""
        if self.rows is None or not self.depends(node):
            return True
        return keeps_rows_apart(self.graph, self.closure([node]), node, self.rows)

    def closure(self, nodes: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> list[fx.Node]:
        """The nodes that `nodes` are computed from, and those that write into them, in order."""
        above = self.flow.ancestors(nodes, ends=set(stop))
        return [node for node in self.graph.nodes if node in above]

    def totals(self, divisor: fx.Node) -> list[fx.Node] | None:
        """The reductions over all rows of which a scalar is made; None if it is not made of such. The count that the
        model itself takes (`NUM_ITEMS`) stands for one."""
        if divisor not in self.shared or not is_scalar(divisor):
            return None
        found: dict[fx.Node, None] = {}
        waiting = [divisor]
        while waiting:
            node = waiting.pop()
            if not self.depends(node) or is_item_count(node):
                found.update({node: None} if is_item_count(node) else {})
            elif reduction_of(self.graph, node) and all(map(self.keeps_rows_apart, node.all_input_nodes)):
                found[node] = None  # of one row it may be one number
            elif not is_scalar(node) or not node.all_input_nodes or self.flow.writers(node):
                return None
            else:
                waiting += node.all_input_nodes
        return list(found)


def is_item_count(node: fx.Node) -> bool:
    """Whether a node is the scalar that a model takes as `num_items_in_batch`."""
    base = node.args[0] if call_name(node) == "getitem" else None
    return isinstance(base, fx.Node) and base.op == "placeholder" and base.target == NUM_ITEMS


def count_graph(view: BatchView, totals: Sequence[Total]) -> tuple[fx.Graph, list[str]]:
    """The graph from a micro-batch's rows to the totals' numbers, and the inputs of the batch that it takes."""
    roots = [t.of for t in totals if isinstance(t.of, fx.Node)]
    targets = [t.of for t in totals if isinstance(t.of, Targets)]
    roots += [t.node for t in targets] + [t.weight for t in targets if t.weight is not None]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in view.closure(roots):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = []
    for total in totals:
        made = _count_targets(graph, total.of, copies) if isinstance(total.of, Targets) else copies[total.of]
        results.append(made)
    graph.output(tuple(results))
    return graph, [str(n.target) for n in graph.nodes if n.op == "placeholder"]


def _count_targets(graph: fx.Graph, of: Targets, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Nodes that count targets, or add up the class weights of each."""
    target = copies[of.node]
    fresh = _Writer(graph, of.node)
    counted = fresh.call("ne", (target, of.ignored), torch.bool)
    if of.weight is None:
        return fresh.call("sum", (counted,), torch.int64, scalar=True)
    table = copies[of.weight]
    classes = fresh.call("masked_fill", (target, fresh.call("logical_not", (counted,), torch.bool), 0), torch.int64)
    dtype = of.weight.meta["val"].dtype
    weights = fresh.call("mul", (fresh.item(table, classes, dtype), counted), dtype)
    return fresh.call("sum", (weights,), dtype, scalar=True)


class _Writer:
    """Adds nodes whose values have the shape of `like`, with its place in the user's model."""

    def __init__(self, graph: fx.Graph, like: fx.Node):
        self.graph, self.like = graph, like

    def call(self, name: str, args: tuple[Any, ...], dtype: torch.dtype, scalar: bool = False) -> fx.Node:
        return self._with_meta(self.graph.call_method(name, args), dtype, scalar)

    def item(self, table: fx.Node, index: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self._with_meta(self.graph.call_function(operator.getitem, (table, index)), dtype, False)

    def _with_meta(self, node: fx.Node, dtype: torch.dtype, scalar: bool) -> fx.Node:
        value = self.like.meta["val"]
        fake = value.new_empty(() if scalar else value.shape, dtype=dtype)
        return describe(node, self.like, fake)


def divisor_graph(
    view: BatchView, divisors: Sequence[tuple[fx.Node | None, Mapping[fx.Node, int]]], totals: Sequence[Total]
) -> fx.Graph | None:
    """The graph from the totals to the divisors, or None where each divisor is the total in its place.

    `divisors`: for each its node, or None for a total itself, and which total each of its reductions is.
    """
    places = [next(iter(of.values())) if node is None else of.get(_uncast(view.graph, node)) for node, of in divisors]
    if places == list(range(len(totals))):
        return None
    graph = fx.Graph()
    given = [_total_input(graph, number, total) for number, total in enumerate(totals)]
    results = []
    for (node, of), place in zip(divisors, places, strict=True):
        if node is None or place is not None:
            assert place is not None
            results.append(given[place])
            continue
        copies = {reduction: given[number] for reduction, number in of.items()}
        for inner in view.closure([node], stop=of):
            if inner not in copies:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
        results.append(copies[node])
    graph.output(tuple(results))
    return graph


def _uncast(graph: OpGraph, node: fx.Node) -> fx.Node:
    """The value that a chain of copies and casts to floats hands on."""
    while node.meta["val"].dtype in _KEEP and (before := copied_operand(graph, node, Elements.SAME)) is not None:
        node = before
    return node


def _total_input(graph: fx.Graph, number: int, total: Total) -> fx.Node:
    like = total.of.node if isinstance(total.of, Targets) else total.of
    fake = like.meta["val"].new_empty((), dtype=torch.float64)
    return describe(graph.placeholder(f"total{number}"), like, fake, source="")
