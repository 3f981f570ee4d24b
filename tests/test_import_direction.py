"""Imports run downwards only: compiler, then passes and codegen, then runtime and, inside it, its ground floor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "runtime": {"runtime"},
    "passes": {"passes", "runtime"},
    "codegen": {"codegen", "runtime"},
    "compiler": {"compiler", "passes", "codegen", "runtime"},
}
# Modules of the ground floor, each with the files split off from it to keep it small; those obey the same rule.
GROUND_FLOOR_PARTS = {
    "errors": set(),
    "units": set(),
    "hardware": {"describe", "detect", "disks", "hardware_errors", "links", "overrides", "presets"},
    "ops": {"op", "op_compute", "op_devices", "op_split", "op_transfers", "op_update", "op_versions"},
    "ssd_folder": {"checksums", "direct_io", "scratch", "ssd_file"},
    "program": {"text"},
}
GROUND_FLOOR = set(GROUND_FLOOR_PARTS).union(*GROUND_FLOOR_PARTS.values())
# The face may say what it exports and import it at first use; everything else comes from the rooms.
FACE_MAY_IMPORT = {"__future__", "importlib", "typing"}


def targets(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names that an import names, as parts below the package; absolute ones start with an empty part."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield ("", *alias.name.split("."))
        return
    base: tuple[str, ...] = ("",)
    if node.level:
        depth = len(path.parent.parts) - (node.level - 1)
        base = path.parent.parts[:depth] if depth >= 0 else ("", "above the package")
    module = node.module.split(".") if node.module else []
    for alias in node.names:
        yield (*base, *module, alias.name)


def complaint(target: tuple[str, ...], path: Path) -> str:
    """Why the file at `path` (relative to the root) may not import `target`; empty when it may."""
    room = path.parts[0] if len(path.parts) > 1 else ""
    if target[0] == "":
        if room == "" and target[1] not in FACE_MAY_IMPORT:
            return "the face imports from the rooms only"
        if target[1] in {"penstock", "above the package", *MAY_IMPORT}:
            return "inside the package imports are relative"
        return ""
    if room == "":
        return "" if target[0] in MAY_IMPORT and len(target) > 1 else "the face imports from the rooms only"
    if target[0] not in MAY_IMPORT[room]:
        return f"{room} may import {', '.join(sorted(MAY_IMPORT[room]))} only"
    if room == "runtime" and path.with_suffix("").parts[1] in GROUND_FLOOR and target[1] not in GROUND_FLOOR:
        return f"the ground floor may import {', '.join(GROUND_FLOOR_PARTS)} and their parts only"
    return ""


def violations(source: str, path: Path) -> list[str]:
    """One line per import in `source` that breaks the rules for the file at `path`, relative to the repository root."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            why = sorted({complaint(target, path) for target in targets(node, path)} - {""})
            found += [f"{path}:{node.lineno}: {ast.unparse(node)}: {reason}" for reason in why]
    return found


def test_every_import_in_the_house_runs_downwards() -> None:
    files = [ROOT / "__init__.py", *(file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))]
    assert len(files) > len(MAY_IMPORT)
    found = [line for file in files for line in violations(file.read_text("utf-8"), file.relative_to(ROOT))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("runtime/device/runtime.py", "from ..passes.coarsen import Coarsen", "runtime may import runtime only"),
        ("runtime/device/runtime.py", "from .. import compiler", "runtime may import runtime only"),
        ("runtime/device/runtime.py", "def f():\n    from ..codegen import text", "runtime may import runtime only"),
        ("runtime/deep/link.py", "from ...passes import coarsen", "runtime may import runtime only"),
        ("passes/graph/coarsen.py", "from ..codegen.text import show", "passes may import passes, runtime only"),
        ("codegen/text.py", "from ..passes.coarsen import Coarsen", "codegen may import codegen, runtime only"),
        ("passes/graph/coarsen.py", "from .. import compile", "passes may import"),
        ("compiler/api.py", "from ..tests.golden import write", "compiler may import"),
        ("compiler/api.py", "from .. import Plan", "compiler may import"),
        ("compiler/api.py", "from penstock.passes import coarsen", "imports are relative"),
        ("compiler/api.py", "import penstock", "imports are relative"),
        ("compiler/api.py", "import runtime.ops", "imports are relative"),
        ("compiler/api.py", "from .... import other", "imports are relative"),
        ("ir/ops/table.py", "from .device import Device", "the ground floor may import"),
        ("ir/program/program.py", "from . import errors, reference", "the ground floor may import"),
        ("runtime/ops/table.py", "from ..simulate import Timeline", "the ground floor may import"),
        ("__init__.py", "import torch", "the face imports from the rooms only"),
        ("__init__.py", "from .tests import golden", "the face imports from the rooms only"),
        ("__init__.py", "from . import runtime", "the face imports from the rooms only"),
    ],
)
def test_an_upward_import_is_found(path: str, source: str, reason: str) -> None:
    (found,) = violations(source, Path(path))
    assert found.startswith(f"{path}:")
    assert reason in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("compiler/api.py", "from ..passes.coarsen import Coarsen\nfrom ..codegen import text\nfrom .trace import go"),
        ("passes/graph/coarsen.py", "import torch\nfrom ..runtime.ops import OPS\nfrom . import graphs"),
        ("runtime/device/runtime.py", "from .ops import OPS\nfrom .reference import run"),
        ("ir/program/program.py", "from . import errors\nfrom .ops import OPS"),
        ("runtime/__init__.py", "from .device import Device"),
        ("runtime/deep/link.py", "from ..errors import HardwareError\nfrom .other import y"),
        ("__init__.py", "from __future__ import annotations\nfrom .compiler.api import compile"),
    ],
)
def test_a_downward_import_is_left_alone(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []
