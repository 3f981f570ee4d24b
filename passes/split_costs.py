"""What a split backward costs: how much of a stage's backward only the gradients of parameters need, and the gradients
that lie there until it comes.

In: a stage's blocks with costs. Out: two fields of its `StageSpec`. The gradient of a parameter in a matrix product or
a convolution takes as many FLOPs as the call in forward; it needs the gradient of the call's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .blocks import Block
from .opgraph import OpGraph
from .stage_costs import storages


def split_costs(graph: OpGraph, blocks: Sequence[Block]) -> dict[str, Any]:
    """`weight_share`: half where the calls of a block are not known, or nothing multiplies."""
    weight_flops, held_bytes, known = 0.0, 0, True
    for block in blocks:
        readers = readers_of_parameters(graph, block)
        held_bytes += sum(storages(readers.values(), with_gradient=True).values())
        known = known and block.cost.calls is not None
        weight_flops += sum(call.flops for call in block.cost.calls or () if call.node in readers)
    whole_flops = sum(block.cost.backward_flops for block in blocks)
    share = min(1.0, weight_flops / whole_flops) if known and whole_flops else 0.5
    return {"weight_share": share, "split_bytes": held_bytes}


def readers_of_parameters(graph: OpGraph, block: Block) -> dict[int, fx.Node]:
    """The block's nodes, by their place, in which trained parameters, or what is made of them alone, meet values."""
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
