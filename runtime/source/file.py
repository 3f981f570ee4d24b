"""A generated file, verified from its syntax tree; only what was verified is run, and from that very tree.

In: the text of a file that a stranger may have written. Out: its classes and functions. At its top level a file has its
docstring, imports, classes, `STAGES`, `step` and `evaluate`, and nothing else; `step` and `evaluate` are straight lines
of ops (`ir/program/text.py`). Imports are not run: their names are bound to what was looked up here.
"""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

from ...ir.errors import VerifyError
from ..modules import Scope, Stage
from .allowed import BUILTINS
from .forward import check_forward
from .members import check_init
from .names import FileNames, excerpt, refuse
from .signature import check_signature
from .trust import Trust

FUNCTIONS = ("step", "evaluate")


def _import_for_library(name: str, *rest: Any) -> Any:
    """C code of torch and NumPy imports parts of these when a function is called for the first time, with the builtins
    of the file that calls it. No verified source has a name for this function."""
    if name.partition(".")[0] not in ("torch", "numpy"):
        raise ImportError(f"a device file imports nothing; {name!r} was asked for")
    return __import__(name, *rest)


_BUILTINS = {name: getattr(builtins, name) for name in (*BUILTINS, "super", "__build_class__")}
_BUILTINS["__import__"] = _import_for_library


def run_verified(path: Path, text: str, trust: Trust) -> dict[str, Any]:
    """The objects that the file defines, by name. Raises `VerifyError` with the line that goes beyond the printed form;
    else whatever its classes raise when they are defined."""
    tree = parse_file(text)
    names = verify_tree(tree, trust, path)
    kept = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom) and not names.is_own(n)]
    code = compile(ast.Module(kept, []), str(path), "exec", dont_inherit=True)
    scope: dict[str, Any] = {"__builtins__": dict(_BUILTINS), "__name__": path.stem, **names.objects}
    exec(code, scope)
    return scope


def parse_file(text: str) -> ast.Module:
    """The text's tree. Raises `VerifyError` for what is no Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise VerifyError(f"line {error.lineno}: not Python: {error.msg}", line=error.lineno) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise VerifyError(f"not Python that can be read: {type(error).__name__}: {error}") from error


def verify_tree(tree: ast.Module, trust: Trust, path: Path = Path("device.py")) -> FileNames:
    """The names at the top of the file at `path`. Raises `VerifyError` where it holds more than is printed."""
    try:
        return _verify(tree, trust, path)
    except RecursionError as error:
        raise VerifyError("an expression is nested too deeply to be read") from error


def _verify(tree: ast.Module, trust: Trust, path: Path) -> FileNames:
    names = FileNames(trust)
    classes: list[ast.ClassDef] = []
    defined: set[str] = set()
    for position, node in enumerate(tree.body):
        if names.is_own(node):
            names.run_own(node, str(path))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.add_import(node)
        elif isinstance(node, ast.ClassDef):
            _check_class(node, names)
            names.add_class(node)
            classes.append(node)
        elif isinstance(node, ast.FunctionDef):
            _check_program(node)
            if node.name in defined:
                refuse(node, f"`{node.name}` is defined a second time", beyond=False)
            defined.add(node.name)
        elif not (_is_docstring(node) and position == 0) and not _is_table(node, names):
            refuse(node, f"{excerpt(node)}: a file holds its imports, classes, STAGES, step and evaluate, nothing else")
    members: dict[str, set[str]] = {}  # of each class, with those of the classes that it builds
    for kind in classes:
        own, built = check_init(_function(kind, 0), names)
        members[kind.name] = own.union(*(members.get(name, ()) for name in built))
        check_forward(_function(kind, 1), names, members[kind.name])
    return names


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_table(node: ast.stmt, names: FileNames) -> bool:
    """Whether this is `STAGES = {"stage0": Stage0}`, of the classes above."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.value, ast.Dict):
        return False
    if not isinstance(node.targets[0], ast.Name) or node.targets[0].id != "STAGES":
        return False
    for key, kind in zip(node.value.keys, node.value.values):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            refuse(node, "STAGES: its keys are the names of stages")
        if not isinstance(kind, ast.Name) or kind.id not in names.blocks:
            refuse(kind, f"STAGES[{key.value!r}] is not a class of this file")
    return True


def _function(kind: ast.ClassDef, place: int) -> ast.FunctionDef:
    function = kind.body[place]
    assert isinstance(function, ast.FunctionDef)
    return function


def _check_class(node: ast.ClassDef, names: FileNames) -> None:
    bases = [names.objects.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
    more = node.decorator_list or node.keywords or getattr(node, "type_params", None)
    if more or len(node.bases) != 1 or bases not in ([Scope], [Stage]):
        refuse(node, f"class {node.name}: a class derives from Scope or Stage, without decorators and keywords")
    if node.name in FUNCTIONS:
        refuse(node, f"class {node.name}: {' and '.join(FUNCTIONS)} are functions of a file", beyond=False)
    found = [function.name for function in node.body if isinstance(function, ast.FunctionDef)]
    if found != ["__init__", "forward"] or len(found) != len(node.body):
        refuse(node, f"class {node.name}: it holds `__init__` and `forward`, nothing else")
    init, forward = _function(node, 0), _function(node, 1)
    check_signature(init, ("self",), exact=True)
    check_signature(forward, ("self",), exact=False)


def _check_program(node: ast.FunctionDef) -> None:
    if node.name not in FUNCTIONS:
        refuse(node, f"def {node.name}: the functions of a file are step and evaluate")
    check_signature(node, ("rt", "batch"), exact=True)
