"""Tries an optimizer before anything runs: what a class, its arguments, its groups and its schedule cannot do is said
here, with what would work, and not in the middle of a training step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import PlanError
from .importable import import_kwargs, resolve
from .probe import FAILURES, TINY, tiny
from .state_shapes import Shape, step_plainly

if TYPE_CHECKING:
    from .spec import OptimizerSpec

DENSE = "pass one that needs only dense gradients, like torch.optim.AdamW"
# Classes that do a part of what a plan does, by the path of the class: why they do not work here.
REPLACED = {
    "torchao.optim.cpu_offload:CPUOffloadOptimizer": "a plan itself keeps states in DRAM or on SSD, and steps them "
    "there, where a device has no room for them; pass the class that it would wrap, like torch.optim.AdamW",
    "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer": "a plan itself shares states among "
    "devices; pass the class that it would wrap, like torch.optim.AdamW",
}
HINTS = {  # by words of what a class complains of
    "closure": "it evaluates the model several times a step, and a step of a plan does so once; " + DENSE,
    "sparse": DENSE + ", or for embeddings torch.optim.Adagrad",
    "dense": DENSE + ", or for embeddings torch.optim.Adagrad",
}


def require_class(path: str, where: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of this path. Raises `PlanError` for what is none, or does what plans do."""
    cls = resolve(path)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        example = "optimizer=partial(torch.optim.AdamW, lr=5e-5)"
        raise PlanError(f"{where}: {path} is no torch.optim.Optimizer class; pass one, like {example}")
    if path in REPLACED:
        raise PlanError(f"{where}: {path}: {REPLACED[path]}")
    return cls


def options_of(path: str, kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Step a small parameter once. Returns the options that a group of this optimizer may have, with their defaults.

    Raises `PlanError` with the class's own message if it cannot be made or stepped.
    """
    cls = require_class(path, where)
    try:
        optimizer = cls([{"params": [tiny(TINY)]}], **import_kwargs(kwargs))
        step_plainly(optimizer)
    except Exception as error:  # whatever a library's class raises
        told = str(error)
        hint = next((f"; {hint}" for word, hint in HINTS.items() if word in told), "")
        raise PlanError(f"{where} {path} does not work with {dict(kwargs)}: {told}{hint}") from error
    return dict(optimizer.defaults)


def try_groups(spec: OptimizerSpec) -> None:
    """Try each group's options as arguments of its class, which checks them there only; then the schedule."""
    for index, group in enumerate(spec.groups):
        path, kwargs = spec.class_of(index)
        cls = resolve(path)
        takes = inspect.signature(cls).parameters
        options = {key: value for key, value in import_kwargs(group.options).items() if key in takes}
        try:
            cls([tiny(TINY)], **{**import_kwargs(kwargs), **options})
            step_plainly(spec.build_alone(index, [tiny(TINY)]))
        except FAILURES as error:
            where = f"param_groups[{index}]"
            raise PlanError(f"{where}: optimizer {path} does not work with {group.options}: {error}") from error
    if spec.scheduler_path is not None:
        _try_scheduler(spec)


def _try_scheduler(spec: OptimizerSpec) -> None:
    optimizer = spec.build_tiny()
    try:
        scheduler = spec.build_scheduler(optimizer)
    except FAILURES as error:
        count = len(spec.all_groups)
        raise PlanError(
            f"lr_scheduler {spec.scheduler_path} does not work with {spec.scheduler_kwargs}: {error}; the "
            f"optimizer has {count} parameter {'group' if count == 1 else 'groups'}"
        ) from error
    assert scheduler is not None
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise PlanError(
            f"lr_scheduler {spec.scheduler_path} needs a metric at every step; pass one that counts steps, "
            "like torch.optim.lr_scheduler.CosineAnnealingLR"
        )


def check_params(spec: OptimizerSpec, params: Mapping[str, tuple[Shape, torch.dtype]]) -> None:
    """Raises `PlanError` naming the first parameter that the optimizer cannot step: because of its dimensions, or of
    the dtype that it is stepped in."""
    tried: set[tuple[int, int, torch.dtype]] = set()
    for name, (shape, dtype) in params.items():
        index = spec.group_of(name)
        key = (index, len(shape), dtype)
        if key in tried:
            continue
        tried.add(key)
        try:
            step_plainly(spec.build_alone(index, [tiny((2,) * len(shape), dtype=dtype)]))
        except FAILURES as error:
            raise _unfit(spec, index, name, shape, dtype, error) from error


def _unfit(spec: OptimizerSpec, index: int, name: str, shape: Shape, dtype: torch.dtype, error: Exception) -> PlanError:
    path, _ = spec.class_of(index)
    kind = str(dtype).removeprefix("torch.")
    what = f"optimizer {path} does not work for {name}, of shape {list(shape)}"
    if dtype != torch.float32 and _steps(spec, index, shape, torch.float32):
        return PlanError(
            f"{what}, in {kind} (tried on a small one: {error}). In float32 it does: use a precision whose optimizer "
            f'updates fp32 masters, like "bf16-true", or an optimizer that steps {kind}, like torch.optim.AdamW'
        )
    return PlanError(
        f"{what} (tried on a small one: {error}); freeze such parameters (requires_grad_(False)), use an optimizer for "
        "all shapes, like torch.optim.AdamW, or one for each kind: optimizer=torch.optim.AdamW, "
        'param_groups=[{"params": penstock.hidden_matrices(model), "optimizer": partial(torch.optim.Muon, lr=0.02)}]'
    )


def _steps(spec: OptimizerSpec, index: int, shape: Shape, dtype: torch.dtype) -> bool:
    try:
        step_plainly(spec.build_alone(index, [tiny((2,) * len(shape), dtype=dtype)]))
    except FAILURES:
        return False
    return True
