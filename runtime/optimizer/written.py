"""The optimizer that a job's settings.json names, which a stranger may have written.

Nothing is imported for it: the class must be torch's own or one that this process has imported already, and its
arguments are plain data. What else a user's own script may ask for needs that user's trust.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from ...ir.errors import PlanError
from .importable import FUNCTION, resolve
from .spec import OptimizerSpec
from .trial import options_of, try_groups

# Its functions make schedulers; elsewhere only classes are known to.
_SCHEDULE_FUNCTIONS = "transformers.optimization"
_HINT = "If you trust the files, load(..., trust=True) or --trust takes it as it is"


def read_optimizer(text: str, where: str, trust: bool) -> OptimizerSpec:
    """Raises `PlanError`, which begins with `where`, for what is no optimizer, or one that does not work with its
    arguments, and, without `trust`, for what could be more than one."""
    try:
        spec = OptimizerSpec.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"{where}: not the optimizer of a job: {type(error).__name__}: {error}") from error
    if not trust:
        _require_safe(spec, where)
    options_of(spec.path, spec.kwargs, f"{where}: optimizer")
    try_groups(spec)
    return spec


def _require_safe(spec: OptimizerSpec, where: str) -> None:
    for path in dict.fromkeys((spec.path, *spec.paths)):
        found = _import(path, f"{where}: optimizer")
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise PlanError(f"{where}: optimizer {path!r} is no torch.optim.Optimizer class")
    if spec.scheduler_path is not None:
        _check_scheduler(spec.scheduler_path, f"{where}: lr_scheduler")
    own = (kwargs for group in spec.groups for kwargs in (group.kwargs, group.options))
    for kwargs in (spec.kwargs, spec.scheduler_kwargs, *own):
        for name, value in kwargs.items():
            _check_plain(value, f"{where}: argument {name!r}")


def _import(path: Any, where: str) -> Any:
    """The object that "module:name" stands for in the modules that this process has imported."""
    if not isinstance(path, str):
        raise PlanError(f"{where} is {path!r}; it is written as 'module:name'")
    module, _, name = path.partition(":")
    if module not in sys.modules:
        raise PlanError(
            f"{where} {path!r}: {module!r} is not imported here, and files do not choose what is; import it in the "
            f"script before load. {_HINT}"
        )
    if any(part.startswith("_") or not part.isidentifier() for part in name.split(".")):
        raise PlanError(f"{where} {path!r} is not written as 'module:name'")
    try:
        return resolve(path)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _check_scheduler(path: Any, where: str) -> None:
    found = _import(path, where)
    is_class = isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)
    if not is_class and not (inspect.isfunction(found) and found.__module__ == _SCHEDULE_FUNCTIONS):
        raise PlanError(f"{where} {path!r} is no class of torch.optim.lr_scheduler. {_HINT}")


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, tuple):
        for part in value:
            _check_plain(part, where)
    elif isinstance(value, str) and value.startswith(FUNCTION):
        raise PlanError(f"{where} is a function of this machine's own: {value!r}. {_HINT}")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise PlanError(f"{where} is {value!r}; numbers, texts and lists of them are allowed")
