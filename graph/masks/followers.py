"""Find where a token's values reach the tokens of other documents in a packed row.

In: the op graph, the inputs that tell where documents end, and those that hold what documents say. Out: the nodes where
tokens meet, but for attention whose mask follows from the first kind of inputs alone, and for the loss: what meets
after the last weights are shifted labels, and sums over tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch.nn.functional as F
from torch import fx

from ...ir.calls import call_name
from ..dataflow import Dataflow
from ..follow.tokens import token_facts
from ..operators.calls import operators
from ..operators.layers import create
from ..operators.record import Elements, is_pointwise, operator_of
from ..operators.reductions import extreme
from ..opgraph import OpGraph
from .calls import batched_product, given_arguments
from .visible import operands

MOVED = (Elements.SAME, Elements.RESHAPED, Elements.MOVED, Elements.SPREAD, Elements.PART, Elements.JOINED)


def meeting_nodes(
    graph: OpGraph, telling: Collection[str], contents: Collection[str], length: int
) -> dict[fx.Node, bool]:
    """The nodes where tokens of several documents meet, in order, and whether each is a part of attention.

    telling, contents: inputs by what they hold; length: the tokens of a row."""
    flow = Dataflow(graph.nodes)

    def dependants(sources: Iterable[fx.Node]) -> set[fx.Node]:
        return flow.descendants(sources, lambda node: operands(graph, node))

    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    borders = dependants(node for node in inputs if node.name in telling)
    content = dependants(node for node in inputs if node.name in contents)
    parameters = graph.parameters()
    weights = dependants(n for n in graph.nodes if n.op == "get_attr" and str(n.target) in parameters) - content
    weighted = [n for n in content if n.op == "call_module" or not weights.isdisjoint(n.all_input_nodes)]
    found = content.intersection(token_facts(graph, length).joined, flow.ancestors(weighted))
    calls = _Attention(graph, content, borders - content)
    return {node: node in calls.open for node in graph.nodes if node in found and node not in calls.closed}


class _Attention:
    """The nodes of calls of attention, by whether a mask that is made of `borders` meets their scores."""

    def __init__(self, graph: OpGraph, content: Collection[fx.Node], borders: Collection[fx.Node]):
        self.graph, self.content = graph, content
        self.closed, self.open = set[fx.Node](), set[fx.Node]()
        for node in graph.nodes:
            masks = self._scores(node)
            if masks is None:
                continue
            inside, met = self._score_nodes(masks)
            is_written = node.target is not F.scaled_dot_product_attention
            below = set(self._weighing(node)) if is_written else {node}
            if below and (not is_written or any(batched_product(graph, n) for n in inside)):
                (self.closed if not met.isdisjoint(borders) else self.open).update(inside, below)

    def _scores(self, node: fx.Node) -> list[fx.Node] | None:
        """The values above a call that give more weight to some pairs of tokens than to others; None for any other."""
        if node.target is F.scaled_dot_product_attention:
            mask = given_arguments(node.args, node.kwargs).get("attn_mask")
            return [mask] if isinstance(mask, fx.Node) else []
        return node.all_input_nodes if call_name(node) == "softmax" else None

    def _score_nodes(self, nodes: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """The nodes between products and these, with them, and the values that meet these on the way."""
        inside, met, waiting = set[fx.Node](), set[fx.Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            product = batched_product(self.graph, node) if node in self.content else ""
            if product or (node in self.content and self._keeps(node)):
                if node not in inside:
                    waiting += node.all_input_nodes[: product == "baddbmm"] if product else node.all_input_nodes
                inside.add(node)
            else:
                met.add(node)
        return inside, met

    def _weighing(self, node: fx.Node) -> Iterator[fx.Node]:
        """The products by the weights of a softmax."""
        for user in node.users:
            if batched_product(self.graph, user):
                yield user
            elif call_name(user) == "dropout" or self._keeps(user):
                yield from self._weighing(user)

    def _keeps(self, node: fx.Node) -> bool:
        """Whether a node works element by element, moves elements, makes constants or finds the largest elements."""
        called = operators(self.graph, node)
        return called is not None and all(
            is_pointwise(func) or operator_of(func).elements in MOVED or operator_of(func).rows in (create, extreme)
            for func in called
        )
