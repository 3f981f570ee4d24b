"""Tensors of a model that are several objects over one memory: what changes one changes the other, in eager PyTorch.

A program holds each tensor by itself. Two that nothing changes are equal for ever, so that they may share memory; a
trained weight, or a buffer that forward writes, may not. Nor are two trained weights over one memory a tie: eager
updates the memory once for each of them, with moments of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ....graph.opgraph import OpGraph
from ....ir.errors import CaptureError

_Named = tuple[str, Tensor]


def require_own_memory(graph: OpGraph) -> None:
    """Raise `CaptureError` that names a tensor which changes in training, and another that shares its memory."""
    parameters = graph.parameters()
    changing = {name for name, parameter in parameters.items() if parameter.requires_grad} | {*graph.changes}
    changing |= {name for node in graph.nodes for name in node.meta.get("updates_buffers", ())}
    sharing: dict[int, dict[int, _Named]] = {}  # by storage and tensor
    for name, tensor in (parameters | graph.buffers()).items():
        if tensor.numel() and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()._cdata
            sharing.setdefault(storage, {}).setdefault(id(tensor), (name, tensor))
    for tensors in sharing.values():
        for (first, one), (second, other) in _neighbours(tensors.values()):
            if {first, second} & changing and _overlap(one, other):
                raise CaptureError(
                    f"{first!r} and {second!r} are two tensors over one memory, so that a change of one changes both: "
                    "make them one object (second_module.weight = first_module.weight, without .data), or give each a "
                    "memory of its own (.clone())"
                )


def _neighbours(tensors: Collection[_Named]) -> Iterator[tuple[_Named, _Named]]:
    """The pairs of one storage's tensors that have a byte between them in common."""
    ordered = sorted(tensors, key=lambda named: _span(named[1]))
    for i, one in enumerate(ordered):
        end = _span(one[1])[1]
        for other in ordered[i + 1 :]:
            if _span(other[1])[0] >= end:
                break
            yield one, other


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the first one after its last element."""
    begin = int(tensor.storage_offset())
    last = begin + sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride()))
    return begin * tensor.itemsize, (last + 1) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one storage belongs to both; between two types, whether their bytes cross."""
    if one.dtype != other.dtype:
        return True
    begin, end = min(map(_span, (one, other)))[0], max(_span(tensor)[1] for tensor in (one, other))
    taken = torch.zeros((end - begin) // one.itemsize, dtype=torch.bool)
    places = [tensor.storage_offset() - begin // one.itemsize for tensor in (one, other)]
    taken.as_strided(one.shape, one.stride(), places[0]).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), places[1]).any())
