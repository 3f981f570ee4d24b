"""Checks of what fills the places of masks: rows of micro-batches are those of the whole batch where each micro-batch
has an element for each place of its masks, such as features of images for the tokens that stand for images.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from ...ir.calls import function_name
from ...runtime.torch_names import assert_async
from ..edit import GraphEdit
from ..opgraph import OpGraph

FILLS = ("masked_scatter", "masked_scatter_")


def check_filled(graph: OpGraph, num_micro_batches: int) -> None:
    """Let the graph of one of several micro-batches check the number of elements for each mask."""
    for node in graph.nodes if num_micro_batches > 1 else ():
        if node.op in ("call_function", "call_method") and function_name(node.target) in FILLS:
            _check(graph, node)


def _check(graph: OpGraph, node: fx.Node) -> None:
    named = dict(zip(("self", "mask", "source"), node.args)) | node.kwargs
    value, mask, source = named.get("self", named.get("input")), named["mask"], named["source"]
    assert isinstance(value, fx.Node) and isinstance(mask, fx.Node) and isinstance(source, fx.Node)
    again = math.prod(value.meta["val"].shape) // max(1, math.prod(mask.meta["val"].shape))  # times that it is spread
    edit = GraphEdit(graph, node)
    places = edit.call(operator.mul, edit.call(torch.sum, mask), again)
    number = source.meta["val"].numel()
    found = edit.call(torch.eq, places, number if isinstance(number, int) else edit.call(torch.numel, source))
    text = (
        f"{node.meta['source']}: a micro-batch has another number of elements than of places that these fill, so that "
        "rows would not get those that they get in the whole batch: give each row an element for each of its places, "
        "or compile with micro_batches=1"
    )
    edit.put("call_function", assert_async, (found, text), None)
