"""Tensors of a model that are several objects over one memory: what changes one changes the other, in eager PyTorch.

A program holds each tensor by itself. Two that nothing changes are equal for ever, so that they may share memory; a
trained weight, or a buffer that forward writes, may not. Nor are two trained weights over one memory a tie: eager
updates the memory once for each of them, with moments of its own.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from ....graph.opgraph import OpGraph
from ....ir.errors import CaptureError


def require_own_memory(graph: OpGraph) -> None:
    """Raise `CaptureError` that names a tensor which changes in training, and another that shares its memory."""
    parameters = graph.parameters()
    changing = {name for name, parameter in parameters.items() if parameter.requires_grad} | {*graph.changes}
    changing |= {name for node in graph.nodes for name in node.meta.get("updates_buffers", ())}
    sharing: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (parameters | graph.buffers()).items():
        if tensor.numel() and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()._cdata
            sharing.setdefault(storage, {}).setdefault(id(tensor), (name, tensor))
    for tensors in sharing.values():
        for (first, one), (second, other) in combinations(tensors.values(), 2):
            if {first, second} & changing and _overlap(one, other):
                raise CaptureError(
                    f"{first!r} and {second!r} are two tensors over one memory, so that a change of one changes both: "
                    "make them one object (second_module.weight = first_module.weight, without .data), or give each a "
                    "memory of its own (.clone())"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one storage belongs to both."""
    if one.dtype != other.dtype:
        return True
    begin, end = (min(t.storage_offset() for t in (one, other)), max(map(_end, (one, other))))
    if max(one.storage_offset(), other.storage_offset()) >= min(_end(one), _end(other)):
        return False
    taken = torch.zeros(end - begin, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - begin).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())


def _end(tensor: Tensor) -> int:
    """The first element of the storage that is past the tensor's last."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride()))
    return int(tensor.storage_offset()) + sum(steps) + 1
