"""The imports of a generated file, and the user's own code that it must carry along because nothing can import it.

In: function objects, classes and enum members found in a graph. Out: the text that names each of them in the file.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..ir.errors import CaptureError
from ..runtime.source.allowed import is_function
from ..runtime.source.homes import HOMES, IMPORT_LINES
from ..runtime.source.names import STANDARD_LINES
from ..runtime.source.trust import Trust
from ..runtime.torch_names import OpOverload, OpOverloadPacket

TAKEN = {"torch", "nn", "F", "math", "operator", "Scope", "Stage", "STAGES", "draw_at", "step", "evaluate", "rt"}
TAKEN |= {"batch", "self", "functions"}


class Imports:
    """The import lines and copied sources of one generated file, collected while its text is written."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {name: IMPORT_LINES[name] for name in ("torch", "nn")}
        self.copied: dict[str, str] = {}  # name -> source of a class or function that nothing can import
        self.homes: dict[str, Any] = {}  # name in the file -> the object that it stands for
        self.calls: set[str] = set()  # names of functions that a stranger's file may not call
        self.draws = False  # random numbers

    def text(self) -> str:
        """The import block, in the order a formatter would choose."""
        lines = sorted(set(self.lines.values()), key=lambda line: (line.startswith("from "), line))
        return "\n".join(lines)

    def names(self) -> set[str]:
        """Names of the file's top level so far, which no local variable may hide."""
        return {name.partition(".")[0] for name in self.lines} | self.homes.keys() | self.copied.keys()

    def trust(self) -> Trust:
        """Trust in what of the user's own the file holds."""
        lines = sorted({*self.lines.values()} - STANDARD_LINES.keys())
        return Trust(statements=(*lines, *self.copied.values()), calls=tuple(sorted(self.calls)))

    def function(self, target: Callable[..., Any]) -> str:
        """The expression that names a function in the file. Raises CaptureError if there is none."""
        name = self._function(target)
        if not is_function(target):
            self.calls.add(name)
        return name

    def _function(self, target: Callable[..., Any]) -> str:
        name = getattr(target, "__name__", "")
        home, known = _public_names().get(id(target), ("", ""))
        if home:
            self._need(home)
            return f"{home}.{known}"
        if getattr(builtins, name, None) is target:
            return name
        if getattr(torch, name, None) is target:  # a private function of torch, known under no public name
            self._need("torch")
            return f"torch.{name}"
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            return f"torch.ops.{target}"
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type):  # a bound classmethod, such as the apply of an autograd function
            return f"{self.reference(owner)}.{name}"
        return self.reference(target)

    def reference(self, thing: Any) -> str:
        """The name under which the file knows a class or function: imported, or its source copied."""
        module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
        if module is None or not path:
            raise CaptureError(f"{thing!r} has no name that a generated file could import: define it with def or class")
        if module.partition(".")[0] == "torch" and _resolve(module, path) is thing:
            self.lines[module] = f"import {module}"
            return f"{module}.{path}"
        if _can_import(thing):
            head, _, rest = path.partition(".")
            name = self._free(head, _resolve(module, head))
            self.lines[f"{module}.{head}"] = f"from {module} import {head}" + (f" as {name}" if name != head else "")
            return f"{name}.{rest}" if rest else name
        return self._copy(thing)

    def _need(self, home: str) -> None:
        if home in IMPORT_LINES:
            self.lines[home] = IMPORT_LINES[home]
        elif not home.startswith("torch."):
            self.lines[home] = f"import {home}"

    def _free(self, name: str, thing: Any) -> str:
        """`name`, or the first numbered form of it that stands for nothing else in the file."""
        candidate, number = name, 1
        while candidate in TAKEN or self.homes.get(candidate, thing) is not thing:
            number += 1
            candidate = f"{name}{number}"
        self.homes[candidate] = thing
        return candidate

    def _copy(self, thing: Any) -> str:
        name = str(thing.__name__)
        if self.homes.get(name) is thing:
            return name
        source = _source_of(thing)
        if source is None:
            raise CaptureError(
                f"{thing.__module__}.{thing.__qualname__} can be neither imported nor read as source, so no generated "
                "file can use it: move it into a module of its own beside your script and import it from there"
            )
        if self._free(name, thing) != name:
            raise CaptureError(f"two different classes are called {name}; rename one of them")
        self._copy_globals(thing, source)
        self.copied[name] = source.rstrip()
        return name

    def _copy_globals(self, thing: Any, source: str) -> None:
        """Bring what the copied source reads from its module: modules, importable names, plain constants."""
        scope = _globals_of(thing)
        tree = ast.parse(source)
        bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)} | {thing.__name__}
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for name in sorted(read - bound):
            if name in scope:
                self._bring(thing, name, scope[name])
            elif not hasattr(builtins, name):
                raise CaptureError(
                    f"{thing.__qualname__} reads {name!r} from around it, which a copy of its source cannot: "
                    "move the class into a module of its own and import it from there"
                )

    def _bring(self, thing: Any, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            line = f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
            if name in TAKEN and self.lines.get(name, IMPORT_LINES.get(name, line)) != line and name != "nn":
                raise CaptureError(f"{thing.__qualname__} calls a module {name!r}, a name that generated files use")
            self.lines.setdefault(name, IMPORT_LINES.get(name, line))
        elif isinstance(value, (bool, int, float, str, type(None))):
            self.copied[name] = f"{name} = {value!r}"
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or _can_import(value):
            if self.reference(value) != name:
                module, path = value.__module__, value.__qualname__
                self.lines[f"{name}:{module}"] = f"from {module} import {path} as {name}"
        else:
            raise CaptureError(
                f"{thing.__qualname__} reads the global {name!r} ({type(value).__name__}), which cannot be copied into "
                "a generated file: move the class into a module of its own and import it from there"
            )


def trust_in(files: Iterable[Imports]) -> Trust:
    """Trust in the user's own code in all of these files."""
    return functools.reduce(Trust.union, (imports.trust() for imports in files), Trust())


def _source_of(thing: Any) -> str | None:
    """The definition of a class or function; None where there is none. Python may give other lines of the file, as it
    does from 3.13 on for a class that `exec` made."""
    try:
        source = textwrap.dedent(inspect.getsource(thing))
        found = ast.parse(source).body
    except (OSError, TypeError, SyntaxError):
        return None
    names = [each.name for each in found if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    return source if names == [thing.__name__] else None


@functools.cache
def _public_names() -> dict[int, tuple[str, str]]:
    """id of a public function to its (home, name), the first home and the function's own name preferred."""
    found: dict[int, tuple[str, str]] = {}
    for home, module in HOMES:
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_") and not isinstance(value, type):
                is_own = getattr(value, "__name__", "") == name
                known = found.get(id(value))
                if known is None or (is_own and known[0] == home):
                    found[id(value)] = (home, name)
    return found


def is_importable(module: str) -> bool:
    """Whether a fresh interpreter with this one's path could import the module, which is false for `__main__`."""
    if module == "__main__":
        return False
    if module in sys.builtin_module_names:
        return True
    path: Any = None
    parts = module.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        spec = None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path)
            if spec is not None:
                break
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _can_import(thing: Any) -> bool:
    """Whether a thing is what a fresh interpreter imports by its module and name: a class, `typing.Optional`."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or not path:
        return False
    return is_importable(module) and _resolve(module, path) is thing


def _resolve(module: str, path: str) -> Any:
    if not all(part.isidentifier() for part in f"{module}.{path}".split(".")):
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # a local class ("f.<locals>.C") or one that was replaced
        return None
    return found


def _globals_of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, types.FunctionType):
        return thing.__globals__
    module = sys.modules.get(thing.__module__)
    return vars(module) if module is not None else {}
