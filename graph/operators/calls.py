"""Questions about a node of an op graph, answered by the records of the operators that it calls.

In: a node. It is run once more on the fake tensors that it was recorded with; functions of torch need no names here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...runtime.torch_names import FakeTensor, TorchDispatchMode
from .record import Elements, OperatorCall
from .table import operator_of


class _Recorder(TorchDispatchMode):
    """Records calls of operators, by the tensor that is their only result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, OperatorCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[id(out)] = OperatorCall(func, args, kwargs or {}, out)
        return out


def copied_operand(node: fx.Node, *ways: Elements) -> fx.Node | None:
    """The operand whose elements are a node's value, if all operators on the way between the two give elements in these
    ways; None for any other node."""
    value = node.meta.get("val")
    if node.op not in ("call_function", "call_method") or node.meta["mutates"] or not isinstance(value, FakeTensor):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    with torch.no_grad(), torch.random.fork_rng(devices=[]), value.fake_mode, _Recorder() as recorder:
        tensor = call(*args[node.op == "call_method" :], **kwargs)
    operands = {id(n.meta["val"]): n for n in node.all_input_nodes}
    while id(tensor) not in operands:
        made_by = recorder.calls.get(id(tensor))
        if made_by is None or operator_of(made_by.func).elements not in ways:
            return None
        tensor = next(made_by.tensors(), None)
    return operands[id(tensor)]
