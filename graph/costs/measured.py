"""Blocks with their costs. A block that equals one measured before, in this model or another, is not measured again.

Passes over the op graph, numbers of micro-batches and calls of `compile` all begin with blocks without costs, most of
them alike. Only blocks of torch's and Penstock's own functions are remembered: a person may change others meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from ...runtime.functions import part_statistics
from ..blocks import Block, BlockCost, structural_hash
from ..opgraph import OpGraph, value_tensors
from .block import measure

MOST = 1 << 12  # costs that are remembered
_KNOWN: dict[Hashable, BlockCost] = {}


def measure_blocks(
    graph: OpGraph, blocks: list[Block], device_kind: str = "cpu", gaps_bytes: int | None = None
) -> list[Block]:
    """The blocks with their costs; blocks of equal hash are measured once. `gaps_bytes`: see `measure`."""
    found: dict[str, BlockCost] = {}
    for block in blocks:
        if block.hash not in found:
            found[block.hash] = _cost(graph, block, device_kind, gaps_bytes)
    return [block.with_cost(found[block.hash]) for block in blocks]


def _cost(graph: OpGraph, block: Block, device_kind: str, gaps_bytes: int | None) -> BlockCost:
    if not all(_is_ours(node) for node in block.nodes):
        return measure(graph, block, device_kind, gaps_bytes=gaps_bytes)
    key = (
        _hash(graph, block),
        device_kind,
        gaps_bytes,
        graph.param_dtype,
        graph.autocast,
        _tensors(graph, block),
        _settings(),
    )
    if key not in _KNOWN:
        if len(_KNOWN) == MOST:
            _KNOWN.clear()
        _KNOWN[key] = measure(graph, block, device_kind, gaps_bytes=gaps_bytes)
    return _KNOWN[key]


def _hash(graph: OpGraph, block: Block) -> str:
    """A hash that is equal for blocks of equal cost: also for parts of a head that differ only in their classes."""
    if not any(node.target is part_statistics for node in block.nodes):
        return block.hash
    return structural_hash(graph, block.layer or block.name, block.nodes, block.inputs, for_costs=True)


def _is_ours(node: fx.Node) -> bool:
    """Whether the node calls a function of Python, torch or Penstock; leaf modules are torch's own."""
    if node.op != "call_function":
        return True
    module = getattr(node.target, "__module__", None)
    if module is None:
        return getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    if module.startswith("torch._ops."):
        return bool(module == "torch._ops.aten")
    return module.partition(".")[0] in ("torch", "penstock", "_operator", "builtins", "math")


def _tensors(graph: OpGraph, block: Block) -> Hashable:
    """The facts of a block's input tensors that the hash leaves out: their layout in memory, and which are the same."""
    held = [t for node in block.inputs for t in value_tensors(node.meta.get("val"))]
    for node in block.nodes:
        held += graph.node_parameters(node).values()
        if node.op == "call_module":
            held += graph.module.get_submodule(str(node.target)).buffers()
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            held.append(getattr(graph.module.get_submodule(owner), name))
    numbers: dict[int, int] = {}
    return tuple((numbers.setdefault(id(t), len(numbers)), tuple(t.shape), t.stride(), t.dtype) for t in held)


def _settings() -> Hashable:
    """Torch's settings by which an operator comes to other calls."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
    )
