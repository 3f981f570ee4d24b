"""The costs of splitting a stage's backward: the share of the backward that only the gradients of parameters need, and
the bytes of gradients that wait for that second half.

In: a stage's blocks with costs. Out: two fields of its `StageSpec`. The gradient of a parameter in a matrix product or
a convolution takes the FLOPs of the call in forward; it needs the gradient of the call's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from ..blocks import Block
from ..dataflow import closure
from ..opgraph import OpGraph, value_tensors


def split_costs(
    graph: OpGraph, blocks: Sequence[Block], body: Sequence[fx.Node], learning: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
) -> dict[str, Any]:  # fmt: skip
    """`body`: the stage's nodes in order; `learning`, `outputs`: inputs and outputs that get gradients. `weight_share`
    is 0.5 where the calls of a block are not known, or backward has no FLOPs."""
    weight_flops, known = 0.0, True
    for block in blocks:
        readers = readers_of_parameters(graph, block)
        known = known and block.cost.calls is not None
        weight_flops += sum(call.flops for call in block.cost.calls or () if call.node in readers)
    whole_flops = sum(block.cost.backward_flops for block in blocks)
    share = min(1.0, weight_flops / whole_flops) if known and whole_flops else 0.5
    return {"weight_share": share, "split_bytes": _waiting_bytes(graph, body, learning, outputs)}


def _waiting_bytes(
    graph: OpGraph, body: Sequence[fx.Node], learning: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> int:
    """Bytes that wait for the second half: gradients of values in which a learning input meets parameters, directly or
    not, and whole gradients of the parameters of outputs that no learning input reaches."""
    reached, waiting = set(learning), 0
    for node in body:
        if reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        beside = (arg for arg in node.all_input_nodes if arg not in reached)
        if (node.op != "get_attr" and _is_trained(graph, node)) or any(_learns(graph, arg) for arg in beside):
            tensors = (t for t in value_tensors(node.meta.get("val")) if t.requires_grad)
            waiting += sum(t.numel() * t.element_size() for t in tensors)
    own = set(body)
    after = closure((n for n in outputs if n not in reached), lambda n: filter(own.__contains__, n.all_input_nodes))
    whole = {id(p): p for node in after for p in graph.node_parameters(node).values() if p.requires_grad}
    return waiting + sum(p.numel() * graph.compute_dtype(p).itemsize for p in whole.values())


def readers_of_parameters(graph: OpGraph, block: Block) -> dict[int, fx.Node]:
    """The block's nodes, by index, that combine trained parameters, or values of these alone, with other values."""
    weights: set[fx.Node] = set()
    found: dict[int, fx.Node] = {}
    for place, node in enumerate(block.nodes):
        reads = node.all_input_nodes
        weights.update(arg for arg in (node, *reads) if arg.op == "get_attr" and _is_trained(graph, arg))
        own = node.op != "get_attr" and _is_trained(graph, node)
        if reads and all(arg in weights for arg in reads):
            weights.add(node)
        elif own or any(arg in weights for arg in reads):
            found[place] = node
    return found


def _is_trained(graph: OpGraph, node: fx.Node) -> bool:
    return any(p.requires_grad for p in graph.node_parameters(node).values())


def _learns(graph: OpGraph, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return _is_trained(graph, node)
    return any(tensor.requires_grad for tensor in value_tensors(node.meta.get("val")))
