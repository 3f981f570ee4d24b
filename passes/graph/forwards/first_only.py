"""Nodes that run in the first forward only: a rematerialisation needs nothing of them.

In: blocks. Out: for each block its nodes without gradients that no node with gradients reads, directly or not, such as
all of a reference's layer in preference training; and for a stage those of its blocks that are left out, which is all
of a block's or none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from ..blocks import Block, storage_root


def unread_by_gradients(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The nodes without gradients that no node with gradients among these reads, as far as these nodes show."""
    inside = set(nodes)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for target in node.meta.get("mutates", ()):
            writers.setdefault(storage_root(target), []).append(node)
    outer = {root for root in writers if root not in inside}  # what is written there may be read elsewhere
    stack = [n for n in nodes if not n.meta.get("no_grad")] + [n for root in outer for n in writers[root]]
    needed = set(stack)
    while stack:
        for operand in stack.pop().all_input_nodes:
            for node in (operand, *writers.get(storage_root(operand), ())):
                if node in inside and node not in needed:
                    needed.add(node)
                    stack.append(node)
    return frozenset(inside - needed)


def left_out(
    blocks: Sequence[Block], own: Collection[fx.Node], shared: Collection[fx.Node] = ()
) -> frozenset[fx.Node]:
    """What a rematerialisation of the stage of these blocks leaves out; nothing where that spares no arithmetic.

    `own`: all nodes of the stage; `shared`: those of them, in order, that belong to no block."""
    found: set[fx.Node] = set()
    spared_flops = 0.0
    for block in reversed(blocks):
        nodes = unread_by_gradients(block.nodes) if block.cost.again is not None else frozenset()
        if all(user in nodes or user in found or user not in own for node in nodes for user in node.users):
            found |= nodes
            spared_flops += block.cost.forward_flops - block.cost.again.flops if block.cost.again is not None else 0.0
    if not spared_flops:
        return frozenset()
    for node in reversed([node for node in shared if node.meta.get("no_grad") and not node.meta.get("mutates")]):
        readers = [user for user in node.users if user in own]
        if readers and found.issuperset(readers):
            found.add(node)
    return frozenset(found)
