"""One file knows the maker of GPUs: everything else reaches streams, events and memory of a GPU through it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

from penstock.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parent.parent
KNOWS = "runtime/accelerator.py"
NAMES = "runtime/torch_names.py"
# What measures a machine calls torch's own functions for its GPUs, one by one: the calls are what is measured.
MEASURES = {f"runtime/measure/{name}.py" for name in ("blocks", "cpu", "cuda", "detect", "links")}
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
