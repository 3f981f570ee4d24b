"""The values of what an op graph computes from constants alone: masks and positions that say where rows are.

Buffers of floats get random numbers in place of their own, since training or a checkpoint may write others: what is
then the same for all rows is so whatever is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.calls import function_name
from ...runtime.torch_names import FakeTensor
from ..dataflow import Dataflow
from ..kernels.call_node import SHAPE_RULES, call_node
from ..opgraph import OpGraph, value_tensors

MOST_ELEMENTS = 1 << 26  # of a value that is computed
HIDDEN, SEEN = -1e30, -1e4  # numbers of a mask: a softmax makes zero of the first beside the second


class ConstantValues:
    def __init__(self, graph: OpGraph):
        self.graph = graph
        self._found: dict[fx.Node, Tensor | None] = {}
        self._parts: dict[fx.Node, bool] = {}

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.graph.nodes)

    def value(self, node: fx.Node, reader: fx.Node) -> Tensor | None:
        """The value of a node that another one reads; None where anything but constants has a part in it."""
        if node not in self._found:
            self._found[node] = self._compute(node)
        is_final = all(self._flow.order[w] < self._flow.order[reader] for w in self._flow.writers(node))
        return self._found[node] if is_final else None

    def part_rows(self, mask: fx.Node, reader: fx.Node, rows: int) -> bool:
        """Whether the mask of a call of attention lets queries see keys of their own row alone."""
        value = self.value(mask, reader)
        if value is not None and mask not in self._parts:
            self._parts[mask] = parts_rows(value, rows)
        return value is not None and self._parts[mask]

    def _compute(self, node: fx.Node) -> Tensor | None:
        values: dict[fx.Node, Any] = {}
        generator = torch.Generator().manual_seed(0)
        for each in self._flow.sort_nodes(self._flow.ancestors([node])):
            sizes = [tensor.numel() for tensor in value_tensors(each.meta["val"])]
            if each.meta.get("random") or each.meta.get("updates_buffers") or max(sizes, default=0) > MOST_ELEMENTS:
                return None
            if each.op == "get_attr":
                value = self._attribute(str(each.target), generator)
                if value is None:
                    return None
                values[each] = value
            elif each.op in ("call_function", "call_method") and each.target not in SHAPE_RULES:
                args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
                values[each] = call_node(self.graph, each, args, kwargs, lambda tensor: tensor)
            else:
                return None
        found = values[node]
        return found if isinstance(found, Tensor) else None

    def _attribute(self, name: str, generator: torch.Generator) -> Tensor | None:
        value = self.graph.constants.get(name)
        if value is None:
            value = dict(self.graph.model.named_buffers(remove_duplicate=False)).get(name)
            if value is not None and value.is_floating_point():
                return torch.rand(value.shape, generator=generator).to(value.dtype)
        is_real = value is not None and not value.is_meta and not isinstance(value, FakeTensor)
        return value.detach().cpu().clone() if is_real and value is not None else None


def is_same_in_rows(value: Tensor, dim: int, rows: int) -> bool:
    """Whether a dimension of a value, cut into a part for each row, has the same in each."""
    first, *others = value.chunk(rows, dim)
    return all(torch.equal(first, other) for other in others)


def parts_rows(mask: Tensor, rows: int) -> bool:
    """Whether queries see keys of their own row alone, at least one, in the same places of each row."""
    queries, keys = mask.shape[-2:]
    if queries % rows or keys % rows:
        return False
    seen = mask if mask.dtype == torch.bool else mask >= SEEN
    hidden = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
    blocks = [part.chunk(rows, -1) for part in mask.chunk(rows, -2)]
    own = [blocks[row][row] for row in range(rows)]
    row_of_query, row_of_key = (torch.arange(rows).repeat_interleave(size // rows) for size in (queries, keys))
    of_others = row_of_query[:, None] != row_of_key
    sees_own = (seen & ~of_others).any(-1).all()
    return bool(hidden[..., of_others].all() and sees_own) and all(torch.equal(own[0], other) for other in own[1:])


def attention_mask(node: fx.Node) -> tuple[Sequence[fx.Node], fx.Node] | None:
    """The query, key and value of a call of attention with a mask, and the mask; None for any other call."""
    if function_name(node.target) != "scaled_dot_product_attention" or node.kwargs.get("is_causal"):
        return None
    given = dict(zip(("query", "key", "value", "attn_mask"), node.args)) | node.kwargs
    found = [each for name in ("query", "key", "value") if isinstance(each := given.get(name), fx.Node)]
    mask = given.get("attn_mask")
    is_plain = len(found) == 3 and isinstance(mask, fx.Node) and len(node.args) <= 4
    return (found, mask) if is_plain and isinstance(mask, fx.Node) else None
