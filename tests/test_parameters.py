"""A function has at most ten parameters; further ones are the fields of a record with a name."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ir", "runtime", "graph", "passes", "codegen", "compiler", "data", "training", "integrations", "cli", "papers")
MOST = 10  # `self` and a `**` among them
ALLOWED = {"compiler/api.py: compile"}  # a user's whole request, in one call


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = function.args
    rest = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return len([*args.posonlyargs, *args.args, *args.kwonlyargs, *rest])


def long_signatures(source: str) -> list[str]:
    functions = [n for n in nodes_of(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if num_parameters(function) > MOST]


def test_no_function_has_more_parameters_than_a_reader_takes_in() -> None:
    files = {file: long_signatures(file.read_text("utf-8")) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    long = {f"{file.relative_to(ROOT).as_posix()}: {name}" for file, names in files.items() for name in names}
    assert long == ALLOWED


def test_every_kind_of_parameter_counts() -> None:
    assert long_signatures("def f(self, a, b, c, d, e, /, g, h, *more, i, **rest): ...") == ["f"]
    assert long_signatures("async def f(self, a, b, c, d, e, /, g, h, *, i, **rest): ...") == []
    assert long_signatures("class A:\n    def f(a, b, c, d, e, f, g, h, i, j, k): ...") == ["f"]
