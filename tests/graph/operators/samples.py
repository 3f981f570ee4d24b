"""Calls of torch's operators, made by torch's own samples of its functions, and a watcher of single calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from penstock.graph.operators.record import operator_name
from penstock.graph.operators.states import Free, Kind, RowState, Scale, whole

Call = tuple[Any, Any, Any, Any]  # operator, args, kwargs, result
LEFT_OUT = ("_refs", "jiterator", "sparse", "torch.ops")


class Rows:
    """A watcher of single calls."""

    def __init__(self, rows: int):
        self.rows, self.is_clear, self.kinds = rows, True, list[Kind]()
        self.states: dict[int, RowState] = {}
        self.orders = itertools.count()

    def state(self, tensor: Tensor) -> RowState:
        return self.states.get(id(tensor)) or Free(varies=whole(range(tensor.dim())))

    def note(self, kind: Kind) -> None:
        self.kinds.append(kind)

    def scale(self, number: float) -> Scale:
        return Scale(unsure=True)

    def new_order(self) -> int:
        return next(self.orders)


class Recorded(TorchDispatchMode):
    """Records calls of operators that change nothing, with copies of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func._schema.is_mutable:
            copied: Any = tree_map_only(Tensor, _copy, (args, kwargs or {}, out))
            self.calls.append((func, *copied))
        return out


def _copy(tensor: Tensor) -> Tensor:
    """A copy, as later calls may write to the tensor itself."""
    return tensor.clone() if tensor.layout is torch.strided else tensor


def recorded_calls(samples: int, calls: int) -> Iterator[Call]:
    """At most `calls` calls of each operator, by the first `samples` samples of each function."""
    allowed = torch.backends.__allow_nonbracketed_mutation_flag
    # Imported here: it takes seconds, and forbids other tests of the process to set cuDNN's flags.
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.__allow_nonbracketed_mutation_flag = allowed
    counts = Counter[str]()
    for info in op_db:
        if torch.float32 not in info.dtypes or info.name.startswith(LEFT_OUT):
            continue
        made = info.sample_inputs_func(info, "cpu", torch.float32, False)  # `sample_inputs` reads the stack for each
        for sample in itertools.islice(made, samples):
            mode = Recorded()
            with torch.no_grad(), mode:
                info.op(sample.input, *sample.args, **sample.kwargs)
            for call in mode.calls:
                counts[operator_name(call[0])] += 1
                if counts[operator_name(call[0])] <= calls:
                    yield call
