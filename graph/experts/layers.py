"""Layers of experts in an op graph: products in groups of rows, each group with the matrix of one expert.

In: the op graph. Out: for each layer its parameters with a matrix per expert, the nodes that compute on rows sorted by
expert, and why its experts cannot be parts, if they cannot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from ...runtime.torch_names import grouped_mm
from ..dataflow import closure
from ..follow.engine import keeps_rows
from ..operators.calls import copied_operand, unknown_call
from ..operators.record import Elements
from ..opgraph import OpGraph, value_tensors
from ..row_parts import held_bytes


@dataclass(frozen=True)
class ExpertLayer:
    """`products`: the layer's products, in order; `inside`: these and what computes between them, in order; `entering`:
    what the rest of the model gives to them, `leaving`: which of them the rest of the model reads."""

    name: str  # the path of the module
    weights: dict[str, nn.Parameter]  # by first name, each with a matrix per expert
    offsets: fx.Node
    products: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    entering: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]
    bytes: int  # of the weights, in the dtype of the computation
    held_bytes: int  # of the weights, the sums of their gradients, and the memory in which gradients are made
    refusal: str = ""

    @property
    def experts(self) -> int:
        return int(next(iter(self.weights.values())).shape[0])

    @property
    def rows(self) -> int:
        return int(self.products[0].meta["val"].shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of all values of rows that enter the layer or are computed in it."""
        nodes = [node for node in (*self.entering, *self.inside) if is_of_rows(node, self.rows)]
        return sum(t.numel() * t.element_size() for node in nodes for t in value_tensors(node.meta["val"]))


def find_expert_layers(graph: OpGraph) -> dict[str, ExpertLayer]:
    """The layers of experts by name. A layer is what multiplies groups that end at the same offsets."""
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    look = _Look(graph)
    for node in look.nodes:
        offsets = node.kwargs.get("offs") if node.op == "call_function" else None
        if node.target is grouped_mm and isinstance(offsets, fx.Node) and weight_of(graph, node, look.ties):
            groups[offsets].append(node)
    found: dict[str, ExpertLayer] = {}
    for offsets, products in groups.items():
        layer = _layer(look, offsets, products)
        found[layer.name if layer.name not in found else f"{layer.name}#{len(found)}"] = layer
    return found


class _Look:
    """The facts of a graph that are looked up for every layer."""

    def __init__(self, graph: OpGraph):
        self.graph, self.nodes = graph, graph.nodes
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.ties, self.parameters = graph.ties(), graph.parameters()
        self.leaving = set(graph.outputs.values())
        self.readers: dict[str, list[fx.Node]] = defaultdict(list)  # a parameter's first name -> nodes that read it
        for node in self.nodes:
            for name in graph.node_parameters(node):
                self.readers[self.ties.get(name, name)].append(node)


def weight_of(
    graph: OpGraph, product: fx.Node, ties: Mapping[str, str] | None = None
) -> tuple[str, tuple[fx.Node, ...]] | None:
    """The first name of the parameter whose matrices a product takes, and the nodes from its read to the product; None
    where it is no parameter with a matrix per group. `ties`: those of the graph, where they are known already."""
    chain: list[fx.Node] = []
    node = product.args[1] if len(product.args) > 1 else None
    while isinstance(node, fx.Node):
        chain.append(node)
        if node.op == "get_attr":
            value = graph.node_parameters(node).get(str(node.target))
            if value is None or value.dim() != 3:
                return None
            ties = graph.ties() if ties is None else ties
            return ties.get(str(node.target), str(node.target)), tuple(reversed(chain))
        before = copied_operand(graph, node, Elements.SAME, Elements.MOVED)
        if node.op != "call_method" or before is None or node.all_input_nodes != [before]:
            return None
        node = before
    return None


def _layer(look: _Look, offsets: fx.Node, products: list[fx.Node]) -> ExpertLayer:
    chains = [weight_of(look.graph, product, look.ties) for product in products]
    reads = {node for chain in chains if chain is not None for node in chain[1]}
    inside = sorted(_inner_nodes(look, products), key=look.order.__getitem__)
    own = set(inside)
    entering = dict.fromkeys(arg for node in inside for arg in node.all_input_nodes if arg not in own | reads)
    entering.pop(offsets, None)
    leaving = tuple(n for n in inside if any(user not in own for user in n.users) or n in look.leaving)
    weights = {chain[0]: look.parameters[chain[0]] for chain in chains if chain is not None}
    return ExpertLayer(
        name=str(products[0].meta["module_path"]),
        weights=weights,
        offsets=offsets,
        products=tuple(products),
        inside=tuple(inside),
        entering=tuple(entering),
        leaving=leaving,
        bytes=sum(weight.numel() * look.graph.compute_dtype(weight).itemsize for weight in weights.values()),
        held_bytes=held_bytes(look.graph, weights.values()),
        refusal=_refusal(look, weights, reads, products, inside, entering, leaving, offsets),
    )


def _inner_nodes(look: _Look, products: list[fx.Node]) -> set[fx.Node]:
    """The products, what is computed of one for another, and what writes into any of these."""
    places = [look.order[product] for product in products]
    window = set(look.nodes[min(places) : max(places) + 1])  # has every node between two of them
    after = closure(products, lambda node: filter(window.__contains__, node.users))
    before = closure(products, lambda node: filter(window.__contains__, node.all_input_nodes))
    return closure(after & before, lambda node: (user for user in node.users if node in user.meta["mutates"]))


def _refusal(
    look: _Look,
    weights: dict[str, nn.Parameter],
    reads: set[fx.Node],
    products: list[fx.Node],
    inside: list[fx.Node],
    entering: Iterable[fx.Node],
    leaving: tuple[fx.Node, ...],
    offsets: fx.Node,
) -> str:
    """The reason why the experts of a layer cannot be parts; empty where they can."""
    graph, order = look.graph, look.order
    own, rows = set(inside), products[0].meta["val"].shape[0]
    readers = {node: name for name in weights for node in look.readers[name]}
    for node in sorted(readers, key=order.__getitem__):
        users = {user for user in node.users if user not in reads and user not in own}
        if users or node not in reads:
            where = next(iter(users), node)
            return f"{where.meta.get('source') or where.name} reads all of {readers[node]}, too"
    if any(name in graph.parts for name in weights):
        return "they are parts already"
    changed = next((name for name in weights if name in graph.changes), None)
    if changed is not None:
        return f"forward changes {changed} in place"
    if len({weight.shape[0] for weight in weights.values()}) != 1:
        return "its matrices are of different numbers of experts"
    for product in products:
        if len(product.args) != 2 or any(product.kwargs.get(key) is not None for key in ("bias", "out_dtype")):
            return f"{product.meta['source']} is a product with more than rows and matrices"
    last = inside[-1]
    late = next((n for n in (*entering, offsets) if order[n] > order[last]), None)
    early = next((user for n in leaving for user in n.users if user not in own and order[user] < order[last]), None)
    if late is not None or early is not None or any(node.meta.get("random") for node in inside):
        return "what is computed between its products is in no single run of calls, or draws random numbers"
    if any(not isinstance(node.meta["val"], torch.Tensor) for node in leaving):
        return "it gives more than tensors"
    given = {node for node in entering if is_of_rows(node, rows)}
    unclear = keeps_rows(graph, inside, given, rows)
    if unclear is None:
        return ""
    place = unclear.meta.get("source") or unclear.name
    return unknown_call(graph, unclear) or f"{place} may mix the rows of different experts"


def is_of_rows(node: fx.Node, rows: int) -> bool:
    """Whether a value has a row for each row of the products."""
    return any(t.dim() > 0 and t.shape[0] == rows for t in value_tensors(node.meta["val"]))
