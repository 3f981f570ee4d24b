"""Private names of PyTorch are in one file, and a worker imports no module of it that takes long to load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime import torch_names
from penstock.tests.syntax import nodes_of
from penstock.tests.test_import_direction import MAY_IMPORT, ROOT

NAMES = Path(torch_names.__file__).resolve()


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore. ATen's operators are data, not names of modules."""
    parts = name.split(".")
    return parts[:3] != ["torch", "ops", "aten"] and any(p.startswith("_") and not p.startswith("__") for p in parts)


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    """The full name of an attribute of what a file has imported from torch; "" for another expression."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    owner = full_name(node.value, known) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


def private_names(source: str) -> Iterator[str]:
    """The private modules and attributes of torch that a source names."""
    known: dict[str, str] = {}
    nodes = nodes_of(source)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from [alias.name] if is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from [name] if is_private(name) else []
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(name := full_name(node, known)):
            yield name


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._grouped_mm(torch.ops.aten._softmax)", ["torch._grouped_mm"]),
        ("from torch._dynamo import lookup_backend", ["torch._dynamo.lookup_backend"]),
        ("from torch import nn\nnn.Module._call_impl", ["torch.nn.Module._call_impl"]),
        ("import torch._ops as ops", ["torch._ops"]),
        ("def f():\n    from torch.nn import _reduction as r", ["torch.nn._reduction"]),
        ("import torch\ntorch.nn.Module.__call__\nx._version\nfrom .torch_names import grouped_mm", []),
    ],
)
def test_a_private_name_is_seen(source: str, names: list[str]) -> None:
    assert list(private_names(source)) == names


def test_no_other_file_names_what_is_private_to_torch() -> None:
    files = [file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py") if file.resolve() != NAMES]
    assert len(files) > 400
    found = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := sorted({*private_names(file.read_text("utf-8"))}))
    }
    assert not found, f"give these a name in runtime/torch_names.py: {found}"


@pytest.mark.parametrize("name", torch_names.LATE)
def test_a_late_name_exists(name: str) -> None:
    assert getattr(torch_names, name) is not None


def test_a_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="torch_names' has no attribute 'nothing'"):
        torch_names.nothing  # noqa: B018


@pytest.mark.slow
def test_a_worker_imports_no_late_module() -> None:
    late = sorted({module for module, _ in torch_names.LATE.values()})
    code = f"import sys, penstock.runtime.processes.worker; print([m for m in {late} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
