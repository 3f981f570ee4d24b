"""Nodes of an op graph on a part of the tokens that one member has: sizes in their calls, and the values they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.errors import PassError
from ..edit import Arguments, change_arguments
from ..kernels.call_node import call_node
from ..operators.calls import names_sizes
from ..opgraph import OpGraph, value_tensors


def arguments_for_shape(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Sequence[int], new: Sequence[int], is_open: bool = True
) -> list[Arguments]:
    """Arguments of a call that is told sizes of its result, for a result of shape `new` in place of `old`; the call's
    own come last. `is_open`: sizes of -1 stay so."""

    def ways(told: Any) -> list[Any]:
        if not isinstance(told, (tuple, list)) or not told or not all(type(size) is int for size in told):
            return []
        places = (range(at, at + len(told)) for at in range(len(old) - len(told) + 1))
        fitting = [place for place in places if all(size in (-1, old[at]) for at, size in zip(place, told))]
        kind = list if isinstance(told, list) else tuple
        return [kind(size if is_open and size < 0 else new[at] for at, size in zip(p, told)) for p in fitting]

    found = [((args[0], *way), kwargs) for way in (ways(args[1:]) if len(args) == len(old) + 1 else ())]
    found += [((*args[:i], way, *args[i + 1 :]), kwargs) for i in range(1, len(args)) for way in ways(args[i])]
    found += [(args, {**kwargs, key: way}) for key, value in kwargs.items() for way in ways(value)]
    return [*found, (args, kwargs)]


class LocalValues:
    """Runs nodes on fake tensors of the sizes that a member has."""

    def __init__(self, graph: OpGraph):
        self.graph = graph
        self.fake_mode: Any = next(v.fake_mode for v in graph.inputs.values() if hasattr(v, "fake_mode"))
        self.fakes: dict[int, Tensor] = {}
        self.sized = {node for node in graph.nodes if names_sizes(graph, node)}

    def set(self, node: fx.Node, shape: Sequence[int] | None = None) -> None:
        """Give a node the value of what it now reads, in the types that it had. `shape`: that of its only tensor, which
        is told to a call that names sizes. Raises `PassError` where it cannot run on these."""
        if shape is not None and node in self.sized:
            change_arguments(node, lambda args, kwargs: self._fit(node, args, kwargs, shape))
        node.meta["val"] = self._run(node, (node.args, node.kwargs))

    def _fit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]) -> Arguments:
        """The arguments with which a call makes a tensor of this shape; its own where it does so with no others."""
        *ways, own = arguments_for_shape(args, kwargs, node.meta["val"].shape, shape)
        for way in ways:
            try:
                if list(self._run(node, way).shape) == list(shape):
                    return way
            except PassError:  # these numbers are no sizes
                continue
        return own

    def _run(self, node: fx.Node, arguments: Arguments) -> Any:
        args, kwargs = fx.map_arg(arguments, lambda n: n.meta["val"])
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
        return made

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.fakes:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            dtype = self.graph.compute_dtype(tensor) if is_parameter else tensor.dtype
            made = torch.empty(tensor.shape, dtype=dtype, requires_grad=tensor.requires_grad)
            self.fakes[id(tensor)] = made
        return self.fakes[id(tensor)]
