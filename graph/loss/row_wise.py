"""Whether a value holds rows of the batch that do not mix: then a sum over it is the sum over its parts.

In: nodes that depend on nothing but the batch and constants. The answer is no for every call that is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...ir.calls import call_name

_POINTWISE = {
    "ne",
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
    "not_equal",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
}
_POINTWISE |= {"and_", "or_", "xor", "invert", "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or"}
_POINTWISE |= {"bitwise_not", "mul", "add", "sub", "rsub", "neg", "truediv", "div", "floordiv", "floor_divide", "mod"}
_POINTWISE |= {"remainder", "pow", "exp", "log", "sqrt", "abs", "float", "double", "half", "bfloat16", "long", "int"}
_POINTWISE |= {"bool", "to", "type", "type_as", "masked_fill", "where", "clamp", "clamp_min", "clamp_max", "maximum"}
_POINTWISE |= {"minimum", "contiguous", "clone", "detach", "isnan", "isin", "sigmoid", "reciprocal", "view_as"}
_POINTWISE |= {"masked_fill_", "clamp_", "mul_", "add_", "copy_", "imul", "iadd", "iand", "ior", "logical_not_"}
_CONSTANT = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full"}
_ALONG = {"sum", "any", "all", "amax", "amin", "mean", "cumsum", "cumprod", "argmax", "argmin", "flip", "roll"}
_SHAPES = {"view", "reshape", "flatten", "squeeze", "expand", "expand_as"}


class RowWise:
    """Answers for the nodes of one graph. `rows`: the rows of one micro-batch; `depends`: whether on the batch."""

    def __init__(self, rows: int, depends: Callable[[Any], bool], writers: Callable[[fx.Node], list[fx.Node]]):
        self.rows, self.depends, self.writers = rows, depends, writers
        self.known: dict[fx.Node, bool] = {}

    def holds(self, node: Any) -> bool:
        """Whether the node's value, and all that is written into it, keeps the rows apart."""
        if not isinstance(node, fx.Node) or not self.depends(node):
            return True
        if node not in self.known:
            self.known[node] = True  # a writer reads what it writes
            self.known[node] = self._holds(node) and all(map(self.holds, self.writers(node)))
        return self.known[node]

    def _holds(self, node: fx.Node) -> bool:
        value, name = node.meta.get("val"), call_name(node)
        inputs = [n for n in node.all_input_nodes if self.depends(n)]
        if "eval_args" in node.meta or not all(map(self.holds, inputs)):
            return False
        if name == "setitem":
            return self._writes_by_rows(node, [n.meta["val"] for n in inputs])
        if not isinstance(value, torch.Tensor):
            return False
        if node.op == "placeholder":
            return value.dim() > 0 and value.shape[0] == self.rows
        return name in _CONSTANT or self._keeps_rows(name, node, [n.meta["val"] for n in inputs])

    def _keeps_rows(self, name: str, node: fx.Node, inputs: list[torch.Tensor]) -> bool:
        value = node.meta["val"]
        if name in _POINTWISE:
            return all(t.dim() == value.dim() and t.shape[:1] == value.shape[:1] for t in inputs)
        if name in _SHAPES:
            return value.dim() == 1 or self._by_rows(value, *inputs)
        if name == "getitem":
            return self._item(node, value)
        if not self._by_rows(value, *inputs):
            return False
        if name in _ALONG:
            place = 2 if name == "roll" else 1
            given = node.args[place] if len(node.args) > place else None
            return self._avoids_rows(node.kwargs.get("dims", node.kwargs.get("dim", given)), inputs[0].dim())
        if name in ("cat", "concat", "unsqueeze"):
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            return self._avoids_rows(dim, value.dim())
        if name in ("slice", "select", "narrow"):
            return self._avoids_rows(node.args[1] if len(node.args) > 1 else None, inputs[0].dim())
        if name == "pad":
            pads: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad", ())
            return bool(len(pads) // 2 < value.dim())
        return name in ("one_hot", "embedding")

    def _by_rows(self, *values: torch.Tensor) -> bool:
        return all(t.dim() > 0 and t.shape[0] == self.rows for t in values)

    def _avoids_rows(self, dims: Any, ndim: int) -> bool:
        given = dims if isinstance(dims, (tuple, list)) else (dims,)
        return all(isinstance(d, int) and not isinstance(d, bool) and d % ndim != 0 for d in given)

    def _item(self, node: fx.Node, value: torch.Tensor) -> bool:
        base, index = node.args
        if not self.depends(base):  # a table: one entry per entry of the index
            return isinstance(index, fx.Node) and value.shape[:1] == index.meta["val"].shape[:1]
        assert isinstance(base, fx.Node)
        return _begins_whole(index) and self._by_rows(base.meta["val"], value)

    def _writes_by_rows(self, node: fx.Node, inputs: list[torch.Tensor]) -> bool:
        index = node.args[1]
        alike = self._by_rows(*inputs) and len({t.dim() for t in inputs}) == 1
        return alike and (isinstance(index, fx.Node) or _begins_whole(index))


def _begins_whole(index: Any) -> bool:
    """Whether an index takes all of the first dimension."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))
