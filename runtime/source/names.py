"""The objects of the names at the top of a file, and of dotted names that begin with one of them.

A chain of attributes is followed here, while the file is verified, and only from one known place to the next: never
through a module to what that module happens to have imported.
"""

from __future__ import annotations

import ast
import builtins
import enum
import importlib
import keyword
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ...ir.errors import VerifyError
from ..modules import Scope, Stage, draw_at
from ..torch_names import OpNamespace, OpOverload, OpOverloadPacket
from .allowed import BUILTINS, OP_HOMES, methods
from .homes import BASES, DRAWING_BASES, HOMES, IMPORT_LINES
from .trust import HINT, Trust

_MODULES = {name: module for name, module in HOMES} | {"nn": torch.nn}
STANDARD_LINES = {line: (name, _MODULES[name]) for name, line in IMPORT_LINES.items()}
STANDARD_LINES |= {f"import {name}": (name, _MODULES[name]) for name in ("math", "operator")}
_ABSENT = object()


def refuse(node: ast.AST, message: str, *, beyond: bool = True) -> NoReturn:
    """`beyond`: the text is no mistake, but more than is run unread."""
    line = getattr(node, "lineno", None)
    raise VerifyError(f"{message}. {HINT}" if beyond else message, line=line)


def excerpt(node: ast.AST) -> str:
    """The beginning of a piece of the file, for a message."""
    text = ast.unparse(node).split("\n")[0]
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"


@dataclass
class FileNames:
    """The names of one file's top level. `blocks`: its own classes; `objects`: what its other names stand for."""

    trust: Trust
    objects: dict[str, Any] = field(default_factory=dict)
    blocks: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._statements = {ast.dump(node) for text in self.trust.statements for node in ast.parse(text).body}
        self._scope: dict[str, Any] = {"__name__": "copied", "__builtins__": builtins}  # of those statements

    def is_own(self, node: ast.stmt) -> bool:
        """Whether the printer has copied a statement from the user's script."""
        return bool(self._statements) and ast.dump(node) in self._statements

    def run_own(self, node: ast.stmt, path: str) -> None:
        """Run such a statement, with the names above it, and add the names that it defines."""
        known = {*self._scope, *self.objects}
        self._scope |= self.objects
        exec(compile(ast.Module([node], []), path, "exec", dont_inherit=True), self._scope)
        for name in self._scope.keys() - known:
            self.check_new(node, name)
            self.objects[name] = self._scope[name]

    def is_called(self, function: ast.expr) -> bool:
        """Whether the graphs of the user's model call a function of this name, which begins with one of the file's."""
        return bool(self.trust.calls) and ast.unparse(function) in self.trust.calls

    def add_class(self, node: ast.ClassDef) -> None:
        self.check_new(node, node.name)
        self.blocks.add(node.name)

    def check_new(self, node: ast.AST, name: str) -> None:
        """Refuse a name that would hide another."""
        if name in self.objects or name in self.blocks or name in BUILTINS or name in ("self", "super"):
            refuse(node, f"{name!r} is defined a second time: it stands for something else in this file", beyond=False)
        if name.startswith("__") or keyword.iskeyword(name):
            refuse(node, f"{name!r} is no name that a file may define")

    # --- imports

    def add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        line = ast.unparse(node)
        if self.blocks:
            refuse(node, f"`{line}`: imports come before the classes", beyond=False)
        if line in (BASES, DRAWING_BASES):
            self.objects |= {"Scope": Scope, "Stage": Stage}
            self.objects |= {"draw_at": draw_at} if line == DRAWING_BASES else {}
        elif line in STANDARD_LINES:
            name, module = STANDARD_LINES[line]
            self.objects[name] = module
        elif isinstance(node, ast.ImportFrom) and node.module and self._is_known(node):
            for alias in node.names:
                self._add_class_of_user(node, node.module, alias)
        else:
            refuse(
                node,
                f"`{line}`: a file imports torch, math, operator, and autograd functions and enums of modules that "
                "your script has imported already",
            )

    def _is_known(self, node: ast.ImportFrom) -> bool:
        module = str(node.module)
        return not node.level and module in self.trust.modules and module.partition(".")[0] != "torch"

    def _add_class_of_user(self, node: ast.ImportFrom, module: str, alias: ast.alias) -> None:
        name = alias.asname or alias.name
        self.check_new(node, name)
        try:
            found = vars(importlib.import_module(module)).get(alias.name)
        except ImportError as error:
            refuse(node, f"cannot import {module}: {error}", beyond=False)
        if not isinstance(found, type):
            refuse(node, f"{module}.{alias.name} is no class; a file imports autograd functions and enums")
        self.objects[name] = found

    # --- dotted names

    def root(self, node: ast.expr) -> str | None:
        """The first name of `a.b.c`, if it is one of the file's."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) and node.id in self.objects else None

    def find(self, node: ast.expr) -> Any:
        """The object of a dotted name. Refuses one that leads out of torch, math, operator and the user's classes."""
        if isinstance(node, ast.Name):
            return self.objects[node.id]
        assert isinstance(node, ast.Attribute)
        owner = self.find(node.value)
        found = _attribute(owner, node.attr)
        if found is not _ABSENT:
            return found
        if any(owner is module for module in _MODULES.values()) and node.attr not in vars(owner):
            refuse(node, f"{excerpt(node.value)} has no {node.attr!r}", beyond=False)
        refuse(node, f"{excerpt(node)} is nothing that a stage needs")


def _attribute(owner: Any, name: str) -> Any:
    is_ops = isinstance(owner, OpNamespace)
    if name.startswith("__") and not (is_ops and name in methods()):
        return _ABSENT
    if owner is torch.ops:
        return getattr(torch.ops, name) if name in OP_HOMES else _ABSENT
    if is_ops or isinstance(owner, OpOverloadPacket):
        found = getattr(owner, name, _ABSENT)
        return found if isinstance(found, OpOverload | OpOverloadPacket) else _ABSENT
    if owner is torch and name == "ops":
        return torch.ops
    if any(owner is module for module in _MODULES.values()):
        found = vars(owner).get(name, _ABSENT)
        is_module = isinstance(found, type(torch))
        return found if not is_module or any(found is module for module in _MODULES.values()) else _ABSENT
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner.__members__.get(name, _ABSENT)
    if isinstance(owner, type) and owner.__module__.partition(".")[0] != "torch":
        found = vars(owner).get(name, _ABSENT)
        return found if isinstance(found, type) else _ABSENT
    return _ABSENT


def is_autograd_function(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, torch.autograd.Function)
