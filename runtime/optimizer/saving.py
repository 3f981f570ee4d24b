"""What a torch optimizer has beside its states, as plain data: groups (learning rate and the like) and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import CheckpointError
from .spec import MODES

MACHINE_KEYS = ("params", *MODES, "capturable", "differentiable")  # of a param group: not saved


def saved_groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of the optimizer's one group; with several groups {"groups": the options of each}."""
    rows = [
        {key: _plain(value, key) for key, value in group.items() if key not in MACHINE_KEYS}
        for group in optimizer.param_groups
    ]
    return rows[0] if len(rows) == 1 else {"groups": rows}


def groups_in(saved: Mapping[str, Any], count: int) -> Sequence[Mapping[str, Any]]:
    """The options that `saved_groups` gave, for each of `count` groups; nothing if nothing was saved.

    Raises `CheckpointError` if there were more or fewer groups.
    """
    found: Sequence[Mapping[str, Any]] = saved.get("groups", [saved] if saved else [])
    if found and len(found) != count:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(found)} parameter groups, this one {count}; compile with the "
            "param_groups with which it was saved"
        )
    return found


def saved_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> dict[str, Any]:
    """A schedule's own state; empty without one."""
    found: dict[str, Any] = _plain(scheduler.state_dict(), "lr_scheduler") if scheduler else {}
    return found


def _plain(value: Any, what: str) -> Any:
    """The value if JSON can hold it; tensors of one element become numbers.

    A dict with other keys than texts is left out: it comes from a constructor (the milestones of MultiStepLR).
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (isinstance(v, dict) and any(not isinstance(i, str) for i in v))}
        return {k: _plain(v, f"{what}.{k}") for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, what) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} of the optimizer is {value!r}, which cannot be saved as plain data")
