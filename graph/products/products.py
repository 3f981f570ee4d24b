"""Linear layers of an op graph, and the weights that they multiply by.

In: the op graph. Out: the products with a matrix of the model, and for each such matrix why its rows cannot be parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..loss.head_loss import product_of
from ..opgraph import OpGraph
from ..tables.tables import find_tables


@dataclass(frozen=True)
class WideProduct:
    """A linear layer: `node` multiplies `hidden` [..., in] with a weight of the model. `out_dim` and `in_dim`: the
    weight's dimensions. `adds_first`: the call is `addmm`."""

    node: fx.Node
    hidden: fx.Node
    weight: str  # by its first name
    bias: str = ""
    out_dim: int = 0
    in_dim: int = 1
    adds_first: bool = False


def find_products(graph: OpGraph) -> Iterable[WideProduct]:
    """All linear layers with a weight that is a whole parameter of the model."""
    ties, changes = graph.ties(), graph.changes

    def first_name(operand: Any) -> str:
        if isinstance(operand, fx.Node):
            operand = str(operand.target) if operand.op == "get_attr" else ""
        name = ties.get(operand, operand)
        return name if name in parameters and name not in graph.parts and name not in changes else ""

    parameters = graph.parameters()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.addmm and len(node.args) == 3 and not node.kwargs:
            bias, hidden, weight = node.args
            if isinstance(hidden, fx.Node) and first_name(weight) and first_name(bias):
                yield WideProduct(node, hidden, first_name(weight), first_name(bias), 1, 0, adds_first=True)
            continue
        operands = product_of(graph, node) if node.op in ("call_module", "call_function") else None
        if operands is None or not first_name(operands[1]) or parameters[first_name(operands[1])].dim() != 2:
            continue
        hidden, weight, bias = operands
        if bias is None or first_name(bias):
            yield WideProduct(node, hidden, first_name(weight), first_name(bias) if bias is not None else "")


def parameter_readers(graph: OpGraph) -> dict[str, set[fx.Node]]:
    """The readers of each parameter, by its first name."""
    ties, found = graph.ties(), dict[str, set[fx.Node]]()
    for node in graph.nodes:
        for name in graph.node_parameters(node):
            users = {node} if node.op == "call_module" else set(node.users)
            found.setdefault(ties.get(name, name), set()).update(users)
    return found


@dataclass(frozen=True)
class LinearWeight:
    """A matrix by its first name, and the products with it. `biases`: the parameters that have a number for each of its
    rows. `refusal`: why its rows cannot be parts."""

    name: str
    value: nn.Parameter
    products: tuple[WideProduct, ...]
    biases: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def rows(self) -> int:
        return int(self.value.shape[0])


def find_linear_weights(graph: OpGraph) -> dict[str, LinearWeight]:
    """The weights of linear layers by name, but for those of tables."""
    products: dict[str, list[WideProduct]] = defaultdict(list)
    for product in find_products(graph):
        products[product.weight].append(product)
    tables, readers, parameters = graph.once(find_tables), parameter_readers(graph), graph.parameters()
    found: dict[str, LinearWeight] = {}
    for name, own in products.items():
        if name in tables:
            continue
        nodes = {product.node for product in own}
        biases = dict.fromkeys(product.bias for product in own if product.bias and product.out_dim == 0)
        turned = {read for node in nodes for read in node.all_input_nodes if nodes.issuperset(read.users)}
        others = [node for read in (name, *biases) for node in readers[read] - nodes - turned]
        refusal = f"{others[0].meta.get('source') or others[0].name} reads all of it, too" if others else ""
        found[name] = LinearWeight(name, parameters[name], tuple(own), tuple(biases), refusal)
    return found
