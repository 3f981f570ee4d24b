"""The types of values between stages: on links, in DRAM, on SSD, and while they wait for a backward.

Autocast leaves some activations in fp32 only because of the call that made them: a layer norm on CUDA, a sum with an
fp32 buffer. Between stages these are cast to the low type, and back where they arrive, and so are their gradients. What
the model itself computes in fp32 (`.float()`, `softmax(dtype=torch.float32)`, a region without autocast) stays as it
is, and so do losses, what a head in parts leaves for one, and values without a gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from ..runtime.functions.part_loss import part_statistics
from ..runtime.functions.ring_attention import with_gradients
from ..runtime.torch_names import tree_leaves
from .edit import describe
from .operators.calls import result_dtype
from .opgraph import OpGraph

WIDE = (part_statistics, with_gradients)  # calls whose results are in fp32 because they add up


def narrow_nodes(graph: OpGraph) -> frozenset[fx.Node]:
    """The nodes whose values have the type `graph.boundary_dtype` between stages, instead of their own."""
    if graph.boundary_dtype is None:
        return frozenset()
    asked: set[fx.Node] = set()  # activations that are in fp32 because the model says so
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if not (isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.requires_grad):
            continue
        if any(arg in asked for arg in node.all_input_nodes) or _asks(graph, node):
            asked.add(node)
        elif value.dim() > 1 and node.op != "get_attr":
            found.append(node)
    return frozenset(found).difference(graph.outputs.values())


def _asks(graph: OpGraph, node: fx.Node) -> bool:
    """Whether the call itself says fp32, whatever it is given: in bf16 it would give fp32, too."""
    setting = node.meta.get("autocast")
    if (setting is not None and not setting[2]) or node.target in WIDE:
        return True
    return result_dtype(graph, node, torch.bfloat16) == torch.float32


def value_bytes(graph: OpGraph, node: fx.Node, narrow: frozenset[fx.Node]) -> int:
    """Bytes of a node's value between stages; `narrow` has the nodes that are cast."""
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    if node in narrow and graph.boundary_dtype is not None:
        return sum(t.numel() for t in tensors) * graph.boundary_dtype.itemsize
    return sum(t.numel() * t.element_size() for t in tensors)


def cast(graph: fx.Graph, copy: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Add to a stage's graph the cast of `copy`, which has the value of `node` in the step."""
    made = graph.call_method("to", (copy, dtype))
    modes = {"autocast": None, "no_grad": False, "block": "", "block_hash": "", "dims": node.meta.get("dims", ())}
    return describe(made, node, node.meta["val"].to(dtype), **modes)
