"""Models that Python code makes: "file.py:function", "package.module:function", "package.module.Class".

A model that is none of transformers has a method `example_inputs(rows)`: what a batch of this number of rows holds,
{"x": {"shape": [rows, 3, 64, 64], "dtype": "float32"}, ...}; its forward takes these by name and returns the loss.
Naming code on the command line runs it, as `python file.py` does; a file may import its neighbours, and packages may
be in the working directory.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from .table import is_known


def is_python(name: str) -> bool:
    """Whether a model's name is one of Python code."""
    first, _, attribute = name.partition(":")
    if first.endswith(".py"):
        return True
    if "=" in attribute or "/" in first or ("." not in first and not attribute) or is_known(name) or is_known(first):
        return False
    return first.replace(".", "").isidentifier() and _top_exists(first)


def _top_exists(dotted: str) -> bool:
    top = dotted.partition(".")[0]
    try:
        return bool(importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())]))
    except (ImportError, ValueError):
        return False


def python_maker(name: str) -> Callable[[], nn.Module]:
    """A function without arguments that makes the model. Raises `PlanError` naming what cannot be found, or is no
    module."""
    first, _, attribute = name.partition(":")
    if first.endswith(".py"):
        module = _module_of_file(Path(first), name)
    else:
        if not attribute:
            first, _, attribute = first.rpartition(".")
        module = _module(first, name)
    found = getattr(module, attribute, None) if attribute else None
    if not callable(found):
        there = [key for key, value in vars(module).items() if _is_own(value, module) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, there, 3, 0.4) or there[:6]
        hint = f"; there are {', '.join(near)}" if near else ""
        what = f"no function or class {attribute!r} in {first}" if attribute else f"say which function: {first}:NAME"
        raise PlanError(f"model {name!r}: {what}{hint}")

    def make() -> nn.Module:
        try:
            made: Any = found()
        except (Exception, SystemExit) as error:  # whatever that code raises
            raise PlanError(f"model {name!r}: cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(made, nn.Module):
            raise PlanError(f"model {name!r} gives a {type(made).__name__}; allowed is a torch.nn.Module")
        return made

    return make


def own_inputs(name: str, inputs: Callable[[int], Any], rows: int) -> dict[str, dict[str, Any]]:
    """The inputs of a batch as the model itself describes them. Raises `PlanError` for what is no such description."""
    try:
        found = inputs(rows)
    except Exception as error:  # whatever that code raises
        raise PlanError(f"model {name!r}: example_inputs({rows}) fails: {type(error).__name__}: {error}") from error
    items = found.items() if isinstance(found, Mapping) else []
    wrong = next((key for key, value in items if not _is_description(value)), None)
    if wrong is not None or not items:
        text = repr(found)[:100] if wrong is None else f"{wrong!r}: {found[wrong]!r}"[:100]
        raise PlanError(
            f"model {name!r}: example_inputs({rows}) gives {text}; allowed is a dict of shapes, such as "
            f'{{"x": {{"shape": [{rows}, 3, 64, 64], "dtype": "float32"}}}}'
        )
    return {str(key): {"dtype": "float32", **value} for key, value in items}


def _is_description(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value.keys() <= {"shape", "dtype"}:
        return False
    return isinstance(value.get("shape"), (list, tuple)) and hasattr(torch, str(value.get("dtype", "float32")))


def random_input(shape: Sequence[int], dtype: str, generator: torch.Generator) -> Tensor:
    """Normal numbers, or 0 and 1, which every table and every count of classes has."""
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=kind)
    return torch.randint(0, 2, tuple(shape), generator=generator).to(kind)


def _module_of_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise PlanError(f"model {name!r}: there is no file {path}")
    _import_from(path.parent)
    key = f"penstock_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever that code raises
        raise PlanError(f"model {name!r}: {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _module(dotted: str, name: str) -> ModuleType:
    _import_from(Path.cwd())
    try:
        return importlib.import_module(dotted)
    except ImportError as error:
        raise PlanError(f"model {name!r}: cannot be imported: {error}; its file.py:function may do") from error


def _import_from(folder: Path) -> None:
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def _is_own(value: Any, module: ModuleType) -> bool:
    """Whether the module itself defines this function or class."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__
