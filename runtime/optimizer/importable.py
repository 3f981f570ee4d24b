"""Classes and functions with keyword arguments as plain data: a module's name and the name in it, so that JSON can
carry them and any process can import them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import PlanError

FUNCTION = "function:"  # how a keyword argument that is an importable function is written down


def path_and_kwargs(given: Any, what: str, example: str) -> tuple[str, dict[str, Any]]:
    """The path and keyword arguments of a class or function, or of a `partial` of one. Raises `PlanError` for anything
    else; `what` names the user's argument, `example` is one that works."""
    if isinstance(given, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        made = type(given).__name__
        raise PlanError(f"{what}: found {made}(...), made for the model of this process; pass the class: {example}")
    positional: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, partial):
        given, positional, kwargs = given.func, given.args, given.keywords
    if positional:
        raise PlanError(f"{what}: the partial has positional arguments {positional!r}; pass them by keyword: {example}")
    written = {name: write_value(value, f"{what} argument {name!r}", example) for name, value in kwargs.items()}
    return import_path(given, what, example), written


def import_path(given: Any, what: str, example: str) -> str:
    """ "module:name" of a class or function that any process can import. Raises `PlanError` for others."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not callable(given) or module is None or name is None:
        raise PlanError(f"{what}: found {given!r}; pass a class or a functools.partial of one: {example}")
    if name.endswith("<lambda>"):
        raise PlanError(f"{what}: a lambda cannot be sent to a worker; pass a function of a module, or {example}")
    if "<locals>" in name or module == "__main__":
        where = "a function" if "<locals>" in name else "the script itself"
        raise PlanError(
            f"{what}: {name} is defined in {where}, where a worker cannot import it; "
            f"move it to a module of its own, or pass {example}"
        )
    if module.startswith("torch.optim.") and getattr(torch.optim, name, None) is given:
        module = "torch.optim"  # the public place: torch.optim.adamw and its like come and go
    return f"{module}:{name}"


def resolve(path: str) -> Callable[..., Any]:
    """The class or function that `import_path` named. Raises `PlanError` if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        named: Callable[..., Any] = found
    except (ImportError, AttributeError) as error:
        raise PlanError(f"cannot import {name!r} from module {module!r}: {error}") from error
    return named


def write_value(value: Any, what: str, example: str) -> Any:
    """The value as plain data; importable functions become text."""
    if isinstance(value, Tensor):
        raise PlanError(f"{what} is a tensor; pass a number, like {example}")
    if isinstance(value, list | tuple):
        return tuple(write_value(v, what, example) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return FUNCTION + import_path(value, what, example)
    raise PlanError(f"{what} is {value!r}; only numbers, texts, lists of them and importable functions are allowed")


def import_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that `write_value` wrote, functions imported again."""

    def load(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(load(v) for v in value)
        if isinstance(value, str) and value.startswith(FUNCTION):
            return resolve(value.removeprefix(FUNCTION))
        return value

    return {name: load(value) for name, value in kwargs.items()}


def lists_to_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(lists_to_tuples(v) for v in value) if isinstance(value, list) else value
