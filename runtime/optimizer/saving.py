"""The settings of a torch optimizer beside its states, as plain data: groups (learning rate and the like) and schedule.

Torch takes over whatever it is given: a schedule's state replaces attributes by name. So what was saved is compared
with what a fresh optimizer has, and tried on a small parameter, before the run's own takes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import CheckpointError
from .importable import lists_to_tuples
from .spec import MODES, OptimizerSpec
from .state_shapes import step_plainly

MACHINE_KEYS = ("params", *MODES, "capturable", "differentiable")  # of a param group: not saved


def saved_groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of the optimizer's one group; with several groups {"groups": the options of each}."""
    rows = [
        {key: _plain(value, key) for key, value in group.items() if key not in MACHINE_KEYS}
        for group in optimizer.param_groups
    ]
    return rows[0] if len(rows) == 1 else {"groups": rows}


def saved_parts(
    spec: OptimizerSpec, group: Mapping[str, Any], schedule: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """The options that `saved_groups` gave, for each group; nothing if nothing was saved.

    Raises `CheckpointError` if there were more or fewer groups, or if these options and this state of the schedule are
    not of the form that the optimizer has, or cannot be stepped with.
    """
    optimizer = spec.build_tiny()
    found, count = group.get("groups", [group] if group else []), len(optimizer.param_groups)
    if not isinstance(found, list):
        raise CheckpointError(f"the checkpoint's optimizer has groups that are no list: {found!r:.60}")
    if found and len(found) != count:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(found)} parameter groups, this one {count}; compile with the "
            "param_groups with which it was saved"
        )
    scheduler = spec.build_scheduler(optimizer)
    now, first = saved_groups(optimizer), saved_schedule(scheduler)
    for row, own in zip(found, now.get("groups", [now])):
        _require_like(row, own, own, "the optimizer's group in the checkpoint", partial=True)
    _step_twice(optimizer, scheduler)
    if scheduler is not None and schedule:
        _require_like(schedule, first, saved_schedule(scheduler), "the schedule in the checkpoint")
    try:
        load_groups(optimizer, found)
        if scheduler is not None and schedule:
            load_schedule(scheduler, schedule)
        _step_twice(optimizer, scheduler)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"no step can be made with the checkpoint's optimizer or schedule: {error}") from error
    return found


def other_settings(spec: OptimizerSpec, group: Mapping[str, Any], schedule: Mapping[str, Any]) -> list[str]:
    """The options and the numbers of the schedule that were saved with other values than the spec has, in words. What
    steps change, such as a scheduled rate, is left out."""
    optimizer = spec.build_tiny()
    scheduler = spec.build_scheduler(optimizer)
    firsts = _rows(saved_groups(optimizer)), saved_schedule(scheduler)
    _step_twice(optimizer, scheduler)
    laters = _rows(saved_groups(optimizer)), saved_schedule(scheduler)
    moving = {"lr"} if scheduler is not None else set()
    texts = []
    for index, (saved, first, later) in enumerate(zip(_rows(group), firsts[0], laters[0])):
        where = f"param_groups[{index}]" if len(firsts[0]) > 1 else "optimizer"
        texts += _differences(where, saved, first, later, moving)
    return texts + _differences("lr_scheduler", schedule, firsts[1], laters[1], {"base_lrs", "last_epoch"})


def own_settings(spec: OptimizerSpec, group: Mapping[str, Any], steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups and the schedule as the spec has them when the schedule has made that number of steps, in the forms
    that are saved. What an optimizer changes in its groups by itself, such as a count, is that of the saved `group`."""
    alone = spec.build_tiny()
    first = _rows(saved_groups(alone))
    step_plainly(alone)
    states = [{key for key in own if own[key] != row.get(key)} for own, row in zip(_rows(saved_groups(alone)), first)]
    optimizer = spec.build_tiny()
    scheduler = spec.build_scheduler(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a schedule that steps more often than its optimizer
        for _ in range(steps):
            if scheduler is not None:
                scheduler.step()
    rows = [
        {**own, **{key: saved[key] for key in keys & saved.keys()}}
        for own, saved, keys in zip(_rows(saved_groups(optimizer)), _rows(group), states)
    ]
    return rows[0] if len(rows) == 1 else {"groups": rows}, saved_schedule(scheduler)


def _rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(group.get("groups", [group] if group else []))


def _differences(
    where: str, saved: Mapping[str, Any], first: Mapping[str, Any], later: Mapping[str, Any], moving: set[str]
) -> list[str]:
    texts = []
    for key in first.keys() & saved.keys() - moving:
        own, value = first[key], saved[key]
        if isinstance(own, list) and own and isinstance(own[0], dict) and isinstance(value, list):
            for inner, other, after in zip(own, value, later[key]):
                texts += _differences(where, other, inner, after, moving)
        elif not key.startswith("_") and own == later.get(key) and value != own:
            texts.append(f"{where} {key}={value!r:.60} (the script has {own!r:.60})")
    return sorted(texts)


def load_groups(optimizer: torch.optim.Optimizer, found: Sequence[Mapping[str, Any]]) -> None:
    """Give the groups the options that `saved_groups` gave."""
    for own, row in zip(optimizer.param_groups, found):
        own.update({key: _like(own.get(key), lists_to_tuples(value)) for key, value in row.items()})


def load_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler, found: Mapping[str, Any]) -> None:
    """Give the schedule the state that `saved_schedule` gave."""
    now = scheduler.state_dict()
    scheduler.load_state_dict({key: _like(now.get(key), value) for key, value in found.items()})


def _like(own: Any, value: Any) -> Any:
    """The value as a tensor where the optimizer has one: some keep their learning rate in one, which they compile."""
    if isinstance(own, Tensor) and isinstance(value, int | float):
        return torch.tensor(value, dtype=own.dtype, device=own.device)
    if isinstance(own, list) and isinstance(value, list) and len(own) == len(value):
        return [_like(one, other) for one, other in zip(own, value)]
    return value


def _step_twice(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> None:
    for _ in range(2):
        step_plainly(optimizer)
        if scheduler is not None:
            scheduler.step()


def _require_like(found: Any, first: Any, later: Any, where: str, partial: bool = False) -> None:
    """Raise `CheckpointError` where plain data is of another form than what was seen `first` and some steps `later`.

    Keys and lengths that differ between the two may differ in `found`; with `partial`, keys may be missing.
    """
    if isinstance(later, dict):
        missing = [] if partial else [k for k in later if isinstance(found, dict) and k in first and k not in found]
        strange = [k for k in found if k not in later] if isinstance(found, dict) else []
        if not isinstance(found, dict) or missing or strange:
            what = f"lacks {missing[0]!r}" if missing else f"has {strange[0] if strange else found!r:.60}"
            raise CheckpointError(
                f"{where} {what}, unlike this run's; it was altered or is of another version of torch."
            )
        for key, value in found.items():
            _require_like(value, first.get(key, later[key]), later[key], f"{where}: {key}", partial)
    elif isinstance(later, list):
        fixed = isinstance(first, list) and len(first) == len(later)
        if not isinstance(found, list) or (fixed and len(found) != len(later)):
            raise CheckpointError(f"{where} is {found!r:.60}, where this run has {later!r:.60}")
        for own, value in zip(later, found):
            _require_like(value, own, own, where, partial)
    elif not _same_kind(found, later) and not _same_kind(found, first):
        raise CheckpointError(f"{where} is {found!r:.60}, where this run has {later!r:.60}")


def _same_kind(found: Any, own: Any) -> bool:
    if own is None:
        return found is None or type(found) in (int, float)
    numbers = (int, float)
    return type(found) in numbers if type(own) in numbers else type(found) is type(own)


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
