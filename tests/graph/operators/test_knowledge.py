"""The files of the product that know operators of torch by name: their number may only fall."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from penstock.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("ir", "runtime", "graph", "codegen", "passes", "compiler", "data", "training", "integrations", "cli", "papers")
PYTHON = ("compiler/capture", "runtime/source", "codegen", "ir", "graph/sizes")  # lists of Python's functions
NAMES_OF_A_LIST = 3
CEILING = 10  # files


def operator_names() -> frozenset[str]:
    """The names of ATen's operators, of torch's functions and methods, and of Python's operators."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for owner in (torch.Tensor, F, operator):
        names |= {n for n in dir(owner) if not n.startswith("__") and callable(getattr(owner, n, None))}
    return frozenset(names)


NAMES = operator_names()


def is_operator(node: ast.expr) -> bool:
    """Whether an expression names an operator, such as "add", torch.add or aten.add.default."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.removeprefix("aten::") in NAMES
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    is_of_torch = isinstance(node, ast.Name) and node.id in ("torch", "F", "aten", "operator")
    return is_of_torch and any(part in NAMES for part in parts[:2])


def lists(source: str) -> Iterator[int]:
    """The lines of lists of operators: literals, keys or values of a dict, arguments, words of a text."""
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [word.partition(".")[0] for word in node.value.split()]
            known = sum(word in NAMES for word in words)
            if known >= NAMES_OF_A_LIST and known > 0.9 * len(words):
                yield node.lineno
        rows: list[list[ast.expr]] = []
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            rows = [node.elts]
        elif isinstance(node, ast.Dict):
            rows = [[key for key in node.keys if key is not None], node.values]
        elif isinstance(node, ast.Call):
            rows = [node.args]
        if any(sum(map(is_operator, row)) >= NAMES_OF_A_LIST for row in rows):
            yield getattr(node, "lineno", 0)


def test_a_list_of_operators_is_found() -> None:
    source = 'A = {"add", "mul", "sub"}\nB = ("add", "shape", "x")\nC = "exp log pow.Scalar"'
    assert list(lists(source)) == [1, 3]
    assert list(lists("D = (torch.add, aten.mul.default, operator.sub)")) == [1]


def test_no_further_file_knows_operators() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    others = [path for path in files if not path.relative_to(ROOT).as_posix().startswith(PYTHON)]
    knowing = {p.relative_to(ROOT).as_posix() for p in others if any(lists(p.read_text("utf-8")))}
    assert len(knowing) <= CEILING, sorted(knowing)
    assert len(knowing) == CEILING, f"lower the ceiling to {len(knowing)}"
