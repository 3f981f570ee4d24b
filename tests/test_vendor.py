"""One file knows the maker of GPUs, and one the private names of PyTorch: everything else goes through these two."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TypeGuard

from penstock.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parent.parent
KNOWS = "runtime/accelerator.py"
NAMES = "runtime/torch_names.py"
# What measures a machine calls torch's own functions for its GPUs, one by one: the calls are what is measured.
MEASURES = {f"runtime/measure/{name}.py" for name in ("blocks", "communicators", "cpu", "cuda", "detect", "links")}
# Text with a private name, which is quick to search.
MAY_USE = re.compile(r"\btorch[\w.]*\._|from torch[\w.]* import (\([^)]*|.*)\b_")
ROOMS = ("ir", "graph", "passes", "codegen", "runtime", "compiler", "data", "training", "integrations", "cli", "papers")


def lines_with_cuda(path: Path) -> list[int]:
    """The lines that use `torch.cuda` or what torch keeps for CUDA alone, however it is imported."""
    source = path.read_text("utf-8")
    if "cuda" not in source:
        return []
    return sorted(node.lineno for node in nodes_of(source) if uses_cuda(node))


def uses_cuda(node: ast.AST) -> TypeGuard[ast.stmt | ast.expr]:
    if isinstance(node, ast.Attribute):
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return (of_torch and node.attr == "cuda") or node.attr.startswith("_cuda_")
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.cuda") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return any(f"{node.module}.{alias.name}".startswith("torch.cuda") for alias in node.names)
    return False


def test_the_search_finds_each_way_to_use_it(tmp_path: Path) -> None:
    ways = ["torch.cuda.synchronize()", "torch._C._cuda_x()", "import torch.cuda", "from torch import cuda",
            "from torch.cuda import Stream", "cuda = torch.version.cuda"]  # fmt: skip
    (tmp_path / "ways.py").write_text("\n".join(ways))
    assert lines_with_cuda(tmp_path / "ways.py") == [1, 2, 3, 4, 5]


def test_one_file_knows_the_maker_of_gpus() -> None:
    files = {p.relative_to(ROOT).as_posix(): p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))}
    users = {name: lines for name, path in files.items() if (lines := lines_with_cuda(path))}
    assert KNOWS in users and set(users) - {KNOWS} == MEASURES | {NAMES}
    # The private name of CUDA that the file of private names holds is the accelerator's alone.
    assert len(users[NAMES]) == 1
    callers = {name for name, path in files.items() if "clear_cublas_workspaces" in path.read_text("utf-8")}
    assert callers == {KNOWS, NAMES}


def uses_private_name(node: ast.AST) -> bool:
    """Whether private names or modules of torch are imported, or read from `torch` itself. Operators are no names."""
    if isinstance(node, ast.ImportFrom):
        return any(is_private(f"{node.module}.{alias.name}") for alias in node.names)
    if isinstance(node, ast.Import):
        return any(is_private(alias.name) for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and is_private(ast.unparse(node))


def is_private(path: str) -> bool:
    first, *names = path.split(".")
    is_of_torch = first == "torch" and names[:1] != ["ops"] and "(" not in path
    return is_of_torch and any(name.startswith("_") and not name.startswith("__") for name in names)


def test_the_search_finds_each_way_to_use_a_private_name() -> None:
    ways = ["from torch._ops import OpOverload", "from torch.nn.modules.loss import _Loss", "import torch._dynamo",
            "torch._C._x()", "torch.nn.Module._apply", "torch.ops.aten._foreach_add", "torch.__version__"]  # fmt: skip
    found = [node.lineno for node in nodes_of("\n".join(ways)) if uses_private_name(node)]
    assert sorted(set(found)) == [1, 2, 3, 4, 5] and all(map(MAY_USE.search, ways[:5]))


def test_one_file_knows_the_private_names_of_torch() -> None:
    files = {p.relative_to(ROOT).as_posix(): p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))}
    sources = {name: text for name, path in files.items() if MAY_USE.search(text := path.read_text("utf-8"))}
    assert {name for name, text in sources.items() if any(map(uses_private_name, nodes_of(text)))} == {NAMES}
