"""Find the attention calls whose mask follows from inputs of the batch, such as the positions of tokens.

In: the op graph and names of inputs. Out: the places of the calls that see the same keys whatever these inputs say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.nn.functional as F
from torch import fx

from ...ir.calls import call_name
from ..dataflow import Dataflow
from ..opgraph import OpGraph
from .calls import batched_product, given_arguments, is_scored, weighs
from .visible import operands


def heedless_attention(graph: OpGraph, names: Collection[str]) -> list[str]:
    """The places of attention calls whose masks do not depend on these inputs."""
    found = []
    inputs = (node for node in graph.nodes if node.op == "placeholder" and node.name in names)
    reached = Dataflow(graph.nodes).descendants(inputs, lambda node: operands(graph, node))
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            mask = given_arguments(node.args, node.kwargs).get("attn_mask")
            is_masked = isinstance(mask, fx.Node) and mask in reached
        elif call_name(node) == "softmax" and weighs(graph, node) and is_scored(graph, node):
            is_masked = any(mask in reached for mask in _addends(graph, node))
        else:
            continue
        if not is_masked:
            found.append(str(node.meta.get("module_path", "")) or node.name)
    return found


def _addends(graph: OpGraph, node: fx.Node) -> Iterator[fx.Node]:
    """The values that meet the scores of a written-out attention on their way from the product to the softmax."""
    shape = node.meta["val"].shape
    for operand in node.all_input_nodes:
        product = batched_product(graph, operand)
        if product == "baddbmm":
            yield operand.all_input_nodes[0]
        elif not product and getattr(operand.meta.get("val"), "shape", None) == shape and is_scored(graph, operand):
            yield from _addends(graph, operand)
        elif not product:
            yield operand
