"""Classes of saved tensors of a stage: what its forward could leave so that rematerialisation computes less.

In: the stage's blocks with their costs, and its nodes in order. Out: one `SavedSpec` per matrix product, convolution or
call of fused attention whose results can be kept (Fuyou 4.5, eq. 12: benefit per byte, here of any model's calls
instead of one transformer's table). `runtime.stage.saved_classes` executes them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from ...ir.calls import function_name
from ...ir.program import SavedSpec
from ...ir.regions import unread_regions
from ...runtime.stage.operators import COSTLY
from ..blocks import Block, CostlyCall
from ..operators.calls import operators
from ..opgraph import OpGraph, value_tensors
from .stage import storages

LEAST_BYTES = 512  # smaller outputs are not worth a copy
_BATCHED = {torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}


def saved_classes(
    graph: OpGraph, blocks: Sequence[Block], body: Sequence[fx.Node], without: Set[fx.Node] = frozenset(),
    unread: Set[fx.Node] = frozenset(),
) -> tuple[tuple[SavedSpec, ...], tuple[int, ...]]:
    """The stage's classes, named after the modules that make the calls; none where the calls cannot be numbered. And
    the numbers of the calls that a rematerialisation does not make, as it leaves out the nodes `without`, and of parts
    `unread` all tiles but what shows their results' shapes.
    `body`: the stage's nodes, shared ones included, in the order in which they run."""
    read: set[int] = set()  # values between blocks that a reader saves
    made: dict[fx.Node, list[CostlyCall]] = {}
    own: set[fx.Node] = set()
    for block in blocks:
        if block.cost.calls is None:
            return (), ()
        own.update(block.nodes)
        read |= storages(n for n, is_saved in zip(block.inputs, block.cost.saved_inputs) if is_saved).keys()
        for call in block.cost.calls:
            made.setdefault(block.nodes[call.node], []).append(call)
    known = graph.looked.setdefault((_num_calls, graph.module), {})  # every partition asks again
    others = [node for node in body if node not in own]
    known.update((node, _num_calls(graph, node)) for node in others if node not in known)
    shared = {node: known[node] for node in others}
    if None in shared.values():
        return (), ()
    absent: list[int] = []
    found: list[SavedSpec] = []
    uses: dict[str, int] = {}
    number = 0
    tiles = {node: part.num_tiles for block in blocks for part in unread_regions(block.nodes) for node in part.nodes}
    for node in body:
        if shared.get(node):
            absent += [number] if node in without else []
            number += 1
        calls = made.get(node, [])
        run_again = len(calls) // tiles[node] if node in unread else 0 if node in without else len(calls)
        for i, call in enumerate(calls):
            name = _class_name(node)
            uses[name] = uses.get(name, 0) + 1
            if i >= run_again:
                absent.append(number)
            elif call.can_be_kept and call.bytes >= LEAST_BYTES:
                unique = name if uses[name] == 1 else f"{name}#{uses[name]}"
                is_saved = call.is_saved or not read.isdisjoint(storages([node]))
                found.append(SavedSpec(unique, call.bytes, call.flops, (number,), is_saved))
            number += 1
    return tuple(found), tuple(absent)


def _class_name(node: fx.Node) -> str:
    """The path of the module that makes the call; for a call in the root module, the function's name."""
    path = str(node.target) if node.op == "call_module" else str(node.meta.get("module_path", ""))
    return path or function_name(node.target, node.name)


def _num_calls(graph: OpGraph, node: fx.Node) -> int | None:
    """The number of costly calls of a shared node, which is not measured: none, or one product of matrices in batches;
    None where there may be others, or another number on another device."""
    called = operators(graph, node)
    operands = [t for n in node.all_input_nodes for t in value_tensors(n.meta.get("val")) if t.is_floating_point()]
    if node.op == "call_module" or (node.op.startswith("call") and called is None and len(operands) > 1):
        return None
    costly = [func for func in called or () if func in COSTLY]
    is_batched = len(costly) == 1 and costly[0] in _BATCHED and all(t.dim() > 2 for t in operands)
    return len(costly) if is_batched or not costly else None
