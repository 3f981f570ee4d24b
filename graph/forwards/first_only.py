"""Nodes that run in the first forward only: a rematerialisation needs nothing of them.

In: blocks. Out: for each block its nodes without gradients that no node with gradients reads, directly or not, such as
all of a reference's layer in preference training, or attention to a block of a ring, which `with_gradients` reads but
needs nothing of; and for a stage those of its blocks that are left out, which is all of a block's or none. And the
parts in tiles of which it needs no results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from ...ir.regions import unread_regions
from ...runtime.functions import with_gradients
from ..blocks import Block
from ..dataflow import Dataflow


def unread_by_gradients(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The nodes without gradients that no node with gradients among these reads, as far as these nodes show."""
    flow, inside = Dataflow(nodes), set(nodes)
    elsewhere = [n for root, writers in flow.written_by.items() if root not in inside for n in writers]
    with_gradients = [n for n in nodes if not n.meta.get("no_grad")]
    here = flow.ancestors([*with_gradients, *elsewhere], lambda n: (a for a in needed_operands(n) if a in inside))
    return frozenset(inside - here)


def needed_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose values a node needs in a rematerialisation."""
    return [n for n in node.all_input_nodes if node.target is not with_gradients or n is not node.args[0]]


def skipped_nodes(
    blocks: Sequence[Block], own: Collection[fx.Node], shared: Collection[fx.Node] = ()
) -> frozenset[fx.Node]:
    """The nodes that a rematerialisation of the stage of these blocks leaves out; none where that saves no FLOPs.

    `own`: all nodes of the stage; `shared`: those of them, in order, that belong to no block."""
    found: set[fx.Node] = set()
    spared_flops = 0.0
    for block in reversed(blocks):
        nodes = unread_by_gradients(block.nodes) if block.cost.again is not None else frozenset()
        needing = (user for node in nodes for user in node.users if user in own and node in needed_operands(user))
        if all(user in nodes or user in found for user in needing):
            found |= nodes
            spared_flops += block.cost.forward_flops - block.cost.again.flops if block.cost.again is not None else 0.0
    if not spared_flops:
        return frozenset()
    for node in reversed([node for node in shared if node.meta.get("no_grad") and not node.meta.get("mutates")]):
        readers = [user for user in node.users if user in own]
        if readers and found.issuperset(readers):
            found.add(node)
    return frozenset(found)


def unread_in(blocks: Sequence[Block], own: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of the parts in tiles whose results nothing in the stage of these blocks reads: a rematerialisation
    keeps what enters them, and backward computes each tile itself. All of a block's or none. `own`: all nodes of the
    stage."""
    found: set[fx.Node] = set()
    for block in blocks:
        parts = unread_regions(block.nodes) if block.cost.unread is not None else []
        inside = {node for part in parts for node in part.nodes}
        if not any(user in own and user not in inside for part in parts for n in part.outputs for user in n.users):
            found |= inside
    return frozenset(found)
