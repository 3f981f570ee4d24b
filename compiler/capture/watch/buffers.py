"""The buffers that a call writes: running statistics, which no version counter shows, and writes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ....graph.edit import set_writes
from ....ir.edges import written_roots
from ....runtime.torch_names import NormBase
from ..calls import RecordedCall
from ..guard import Borrowed


def note_buffers(held: Borrowed, call: RecordedCall, node: fx.Node, args: Any, kwargs: Any) -> None:
    """Say at a call's node which buffers of the borrowed model it writes."""
    names: list[str] = []
    if call.kind == "call_module":
        module = held.modules[call.target]
        keeps_statistics = isinstance(module, NormBase) and module.track_running_stats
        if keeps_statistics and module.training:
            names += [f"{call.target}.{name}" for name, buffer in module._buffers.items() if buffer is not None]
    elif call.target in (nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm):
        set_writes(node, _running_statistics(call.target, args, kwargs))
    for owner in written_roots(node):
        if owner.op == "get_attr" and owner.target in held.buffers:
            names.append(str(owner.target))
    if names:
        node.meta["updates_buffers"] = tuple(names)


def _running_statistics(target: Any, args: Any, kwargs: Any) -> tuple[fx.Node, ...]:
    """The running mean and variance that a functional norm in training mode writes."""
    names = ["running_mean", "running_var"]
    first = 3 if target is torch.batch_norm else 1
    given = [kwargs.get(name, args[first + i] if len(args) > first + i else None) for i, name in enumerate(names)]
    flag = "use_input_stats" if target is nn.functional.instance_norm else "training"
    default = target is nn.functional.instance_norm
    training = kwargs.get(flag, args[5] if len(args) > 5 else default)
    return tuple(node for node in given if training and isinstance(node, fx.Node))
