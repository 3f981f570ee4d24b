"""One node of an op graph called on other values than it was recorded with, such as fake tensors of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..opgraph import OpGraph
from .stand_ins import SHAPE_RULES


def call_node(graph: OpGraph, node: fx.Node, args: Any, kwargs: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    """Run the node's call on these arguments. `fake`: what stands for a parameter or buffer of a leaf module."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        own = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
        return torch.func.functional_call(leaf, {name: fake(tensor) for name, tensor in own}, args, kwargs)
    target: Any = SHAPE_RULES.get(node.target, node.target)
    return target(*args, **kwargs)
