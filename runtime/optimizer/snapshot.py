"""A stage's optimizer before a step, so that a step which should not have been made can be undone bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ir.program import aligned
from .leaves import leaves_of

if TYPE_CHECKING:
    from .spec import OptimizerSpec
    from .stage_optimizer import StageOptimizer

MASTER = ""  # the copy of the parameter itself, among those of its states
COPIED = object()  # in place of the value of a state that is a large tensor


@dataclass
class OptimizerSnapshot:
    """`copies`: parameter name to state name to its copy, MASTER for the parameter; empty without tensors.

    `rows`: per parameter that had states, state name to value, or to COPIED for the large ones, whose tensors are among
    the copies.
    """

    copies: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    tensors: bool = True


def room_bytes(spec: OptimizerSpec, params: Mapping[str, Tensor]) -> int:
    """Bytes for copies of all parameters and of their large states, each aligned."""
    states = (spec.state_shapes(tuple(param.shape), name, param.dtype).values() for name, param in params.items())
    return sum(aligned(param.nbytes) for param in params.values()) + sum(
        aligned(math.prod(shape) * dtype.itemsize) for row in states for shape, dtype in row
    )


def make_room(spec: OptimizerSpec, params: Mapping[str, Tensor], buffer: Tensor) -> dict[str, dict[str, Tensor]]:
    """Places for the copies in the flat uint8 `buffer`."""
    copies: dict[str, dict[str, Tensor]] = {}
    offset = 0
    for name, param in params.items():
        wanted = {MASTER: (tuple(param.shape), param.dtype), **spec.state_shapes(tuple(param.shape), name, param.dtype)}
        copies[name] = {}
        for key, (shape, dtype) in wanted.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            copies[name][key] = buffer[offset : offset + num_bytes].view(dtype).view(shape)
            offset += aligned(num_bytes)
    return copies


def keep(optimizer: StageOptimizer, tensors: bool, into: OptimizerSnapshot | Tensor | None) -> OptimizerSnapshot:
    """See `StageOptimizer.snapshot`."""
    found = into if isinstance(into, OptimizerSnapshot) else OptimizerSnapshot()
    found.rows, found.groups, found.scheduler, found.tensors = {}, [], None, tensors
    if optimizer.optimizer is None:
        return found
    if tensors and not found.copies:
        if not isinstance(into, Tensor):
            into = torch.empty(room_bytes(optimizer.spec, optimizer.params), dtype=torch.uint8, device=optimizer.device)
        found.copies = make_room(optimizer.spec, optimizer.params, into)
    for name, param in optimizer.params.items():
        row = optimizer.optimizer.state.get(param)
        known = optimizer.state_row(name)
        large = known.large()
        if tensors:
            found.copies[name][MASTER].copy_(optimizer.lasting[name])
        if not row:
            continue
        copied = {key: leaves for key, value in row.items() if (leaves := leaves_of(key, value)).keys() & large.keys()}
        found.rows[name] = {
            key: COPIED if key in copied else value if key in known.shared else _copy(value)
            for key, value in row.items()
        }
        for leaves in copied.values() if tensors else ():
            for leaf, tensor in leaves.items():
                found.copies[name][leaf].copy_(tensor)
    for group in optimizer.optimizer.param_groups:
        found.groups.append({key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
    if optimizer.scheduler is not None:
        found.scheduler = copy.deepcopy(optimizer.scheduler.state_dict())
    return found


def put_back(optimizer: StageOptimizer, found: OptimizerSnapshot) -> None:
    """See `StageOptimizer.restore`."""
    if optimizer.optimizer is None:
        return
    for name, param in optimizer.params.items():
        if found.tensors:
            optimizer.lasting[name].copy_(found.copies[name][MASTER])
        if name not in found.rows:
            optimizer.optimizer.state.pop(param, None)
            continue
        row, saved = optimizer.optimizer.state[param], found.rows[name]
        for key in [key for key in row if key not in saved]:
            del row[key]
        for key, value in saved.items():
            if value is not COPIED:
                row[key] = _copy(value)
            elif found.tensors:
                for leaf, tensor in leaves_of(key, row[key]).items():
                    tensor.copy_(found.copies[name][leaf])
    for group, saved_group in zip(optimizer.optimizer.param_groups, found.groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(copy.deepcopy(saved_group), params=params)
    if optimizer.scheduler is not None and found.scheduler is not None:
        optimizer.scheduler.load_state_dict(copy.deepcopy(found.scheduler))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
