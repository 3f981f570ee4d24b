"""Nodes of an op graph that work on one member's part of the tokens: sizes in their calls, and the values they make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...ir.calls import call_name
from ...ir.errors import PassError
from ..edit import change_arguments
from ..follow.tokens import TokenPlace
from ..kernels.call_node import call_node
from ..opgraph import OpGraph, value_tensors

# Calls that are told the size of every dimension of their result: the first argument after the value, or all of them.
SIZED = frozenset(("view", "reshape", "expand", "_unsafe_view", "new_empty", "new_ones", "new_zeros"))


def with_local_sizes(node: fx.Node, place: TokenPlace | None, team: int) -> None:
    """Let a call that is told the sizes of its result make a member's part of it. `place`: of the tokens in it."""
    if place is None or node.op == "call_module":
        return
    value: Tensor = node.meta["val"]
    name, dim, whole = call_name(node), place.dim, value.shape[place.dim]
    change_arguments(node, lambda args, kwargs: _resized(name, args, kwargs, dim, value.dim(), whole, team))


def _resized(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, dims: int, whole: int, team: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in SIZED:
        for key in ("shape", "size"):
            if key in kwargs:
                kwargs[key] = _divided(kwargs[key], dim, whole, team)
        if len(args) == 2 and isinstance(args[1], (tuple, list)):
            args = (args[0], _divided(args[1], dim, whole, team))
        elif len(args) > 1:
            args = (args[0], *_divided(args[1:], dim, whole, team))
    elif name == "unflatten":
        at = int(kwargs.get("dim", args[1] if len(args) > 1 else 0))
        sizes = kwargs["sizes"] if "sizes" in kwargs else args[2]
        first = at if at >= 0 else at + dims - len(sizes) + 1
        if first <= dim < first + len(sizes):
            sizes = _divided(sizes, dim - first, whole, team)
        if "sizes" in kwargs:
            kwargs["sizes"] = sizes
        else:
            args = (*args[:2], sizes)
    return args, kwargs


def _divided(sizes: Any, dim: int, whole: int, team: int) -> Any:
    found = list(sizes)
    if dim < len(found) and found[dim] == whole:
        found[dim] = whole // team
    return type(sizes)(found) if isinstance(sizes, list) else tuple(found)


class LocalValues:
    """Runs nodes on fake tensors of the sizes that a member has."""

    def __init__(self, graph: OpGraph):
        self.graph = graph
        self.fake_mode: Any = next(v.fake_mode for v in graph.inputs.values() if hasattr(v, "fake_mode"))
        self.fakes: dict[int, Tensor] = {}

    def set(self, node: fx.Node) -> None:
        """Give a node the value of what it now reads, in the types that it had. Raises `PassError` where it cannot run
        on these."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            with torch.random.fork_rng(devices=[]), self.fake_mode, torch.set_grad_enabled(not node.meta["no_grad"]):
                made = call_node(self.graph, node, args, kwargs, self._fake)
                before, now = list(value_tensors(node.meta["val"])), list(value_tensors(made))
                same = len(before) == len(now) and all(a.dtype == b.dtype for a, b in zip(before, now))
                if not same and len(before) == len(now) == 1:  # the step runs under autocast
                    made = made.to(before[0].dtype)
        except Exception as error:
            raise PassError(
                f"{node.name} ({node.meta.get('source', '')}) cannot run on a part of the tokens: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error
        node.meta["val"] = made

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.fakes:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            dtype = self.graph.compute_dtype(tensor) if is_parameter else tensor.dtype
            made = torch.empty(tensor.shape, dtype=dtype, requires_grad=tensor.requires_grad)
            self.fakes[id(tensor)] = made
        return self.fakes[id(tensor)]
