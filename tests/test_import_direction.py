"""Imports, also those for types alone, run downwards only: from floor to floor, and in a room from folder to folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tests.syntax import tree_of

ROOT = Path(__file__).resolve().parents[1]
# Per room what it may import besides itself. `penstock reproduce` reaches `papers` through an entry point.
MAY_IMPORT = {
    "ir": (),
    "runtime": ("ir",),
    "graph": ("runtime", "ir"),
    "codegen": ("runtime", "ir"),
    "passes": ("graph", "runtime", "ir"),
    "compiler": ("passes", "codegen", "graph", "runtime", "ir"),
    "data": ("compiler", "passes", "codegen", "graph", "runtime", "ir"),
    "training": ("data", "compiler", "passes", "codegen", "graph", "runtime", "ir"),
    "integrations": ("training", "data", "compiler", "passes", "codegen", "graph", "runtime", "ir"),
    "cli": ("training", "data", "compiler", "passes", "codegen", "graph", "runtime", "ir"),
    "papers": ("cli", "training", "data", "compiler", "passes", "codegen", "graph", "runtime", "ir"),
}
# The folders and files of a room, lowest first: each may import itself and those before it.
ORDER = {
    "ir": (
        "errors", "extensions", "documents", "units", "precision", "names", "machine", "stages", "ops", "calls",
        "edges", "plain_graph", "regions", "program", "verify",
    ),
    "runtime": (
        "torch_names", "script_caches", "accelerator", "modules", "experts", "quantised", "functions", "forced_eager",
        "model_names", "children", "forks", "scratch", "bad_step", "nodes", "threads", "turns", "source", "simulate",
        "ssd", "state", "optimizer", "compiled", "stage", "reference", "device", "emulate", "measure", "processes",
    ),
    "graph": (
        "loss_terms", "opgraph", "row_parts", "turn_seconds", "operators", "kernels", "dataflow", "edit", "boundaries",
        "sizes", "blocks", "operator_blocks", "follow", "experts", "forwards", "costs", "loss", "masks", "tables",
        "products", "divide", "layers", "regions", "stages", "profile",
    ),
    "passes": (
        "work_limit", "run_again", "decisions", "draft", "base", "equal_programs", "phases", "receive_earlier",
        "rewrite", "mapping", "partition", "partition_mip", "partition_mixed", "sharding", "optimizer", "staying",
        "memory", "schedule", "table",
    ),
    "compiler": (
        "planning", "stale", "own_copy", "strategies", "plan", "steps", "pipeline", "models", "packing", "capture",
        "batches", "folder", "changed_params", "loss", "profile", "search", "report", "replanner", "export", "job",
        "preference", "arguments", "request", "graphs", "check", "load", "api",
    ),
    "training": ("listener", "plain", "records", "watch", "broadcast", "logs", "live"),
    "integrations": ("said", "transformers", "trl", "accelerate", "launch"),
}  # fmt: skip
MOST_FILES = 18  # in one folder
# The package's own file may say what it exports and import it at first use; everything else comes from the rooms.
PACKAGE_MAY_IMPORT = {"__future__", "importlib", "sys", "typing"}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node, and the statements inside it: expressions import nothing."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(node, name, None)
        for child in inside if isinstance(inside, list) else ():
            yield from statements(child)


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
    """The reason why the file at `path` (relative to the root) may not import `target`; empty when it may."""
    room = path.parts[0] if len(path.parts) > 1 else ""
    if target[0] == "":
        if room == "" and target[1] not in PACKAGE_MAY_IMPORT:
            return "the package imports from the rooms only"
        if target[1] in {"penstock", "above the package", *MAY_IMPORT}:
            return "inside the package imports are relative"
        return ""
    if room == "":
        return "" if target[0] in MAY_IMPORT and len(target) > 1 else "the package imports from the rooms only"
    if target[0] != room:
        allowed = MAY_IMPORT[room]
        return "" if target[0] in allowed else f"{room} may import {', '.join(allowed) or 'itself'} only"
    return inside_a_room(target, path)


def inside_a_room(target: tuple[str, ...], path: Path) -> str:
    room, own = path.parts[0], path.with_suffix("").parts[1]
    order = ORDER.get(room)
    if order is None or own == "__init__":
        return ""
    unknown = next((name for name in (own, target[1]) if name not in order), None)
    if unknown is not None:
        return f"{room}/{unknown} has no place in ORDER"
    return "" if order.index(target[1]) <= order.index(own) else f"{room}/{target[1]} stands above {room}/{own}"


def violations(source: str, path: Path) -> list[str]:
    """One line per import in `source` that breaks the rules for the file at `path`, relative to the repository root."""
    found = []
    for node in statements(tree_of(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            why = sorted({complaint(target, path) for target in targets(node, path)} - {""})
            found += [f"{path}:{node.lineno}: {ast.unparse(node)}: {reason}" for reason in why]
    return found


def test_no_folder_of_a_room_has_more_files_than_a_reader_takes_in() -> None:
    folders = {file.parent for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert max(counts.values()) > 10 and not {name: count for name, count in counts.items() if count > MOST_FILES}


def test_every_import_in_the_house_runs_downwards() -> None:
    files = [ROOT / "__init__.py", *(file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))]
    assert len(files) > len(MAY_IMPORT)
    found = [line for file in files for line in violations(file.read_text("utf-8"), file.relative_to(ROOT))]
    assert not found, "\n".join(found)


def test_the_order_names_what_is_there() -> None:
    for room, order in ORDER.items():
        present = {p.stem for p in (ROOT / room).iterdir() if p.suffix == ".py" or any(p.glob("*.py"))}
        assert sorted(order) == sorted(present - {"__init__"}), room


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("ir/program/order.py", "from ...runtime.simulate import simulate", "ir may import itself only"),
        ("ir/ops/record.py", "from ..program import Program", "ir/program stands above ir/ops"),
        ("ir/ops/record.py", "if TYPE_CHECKING:\n    from ..program import Program", "above ir/ops"),
        ("ir/machine/hardware.py", "def detect():\n    from ...runtime.measure import detect", "ir may import itself"),
        ("ir/units.py", "from .ops.table import ALL", "ir/ops stands above ir/units"),
        ("runtime/device/runtime.py", "from ...passes.rewrite.coarsen import Coarsen", "runtime may import ir only"),
        ("runtime/device/runtime.py", "from ... import compiler", "runtime may import ir only"),
        ("runtime/modules.py", "def f():\n    from ..codegen import text", "runtime may import ir only"),
        ("runtime/device/peers.py", "from ..processes.worker import main", "runtime/processes stands above"),
        ("runtime/new.py", "from .modules import Stage", "runtime/new has no place"),
        ("graph/blocks.py", "from ..passes.draft import Draft", "graph may import runtime, ir only"),
        ("passes/base.py", "from ..codegen.names import show", "passes may import graph, runtime, ir only"),
        ("passes/rewrite/coarsen.py", "from ..memory.insert_fetch import InsertFetch", "passes/memory stands above"),
        ("codegen/names.py", "from ..passes.base import Pass", "codegen may import runtime, ir only"),
        ("passes/base.py", "from .. import compile", "passes may import"),
        ("compiler/api.py", "from ..tests.golden_text import write", "compiler may import"),
        ("compiler/api.py", "from ..cli.main import main", "compiler may import"),
        ("compiler/search/search.py", "from ..job.job import Job", "compiler/job stands above"),
        ("cli/main.py", "from ..papers.report import Report", "cli may import"),
        ("compiler/api.py", "from .. import Plan", "compiler may import"),
        ("compiler/api.py", "from penstock.passes import base", "imports are relative"),
        ("compiler/api.py", "import penstock", "imports are relative"),
        ("compiler/api.py", "import runtime.modules", "imports are relative"),
        ("compiler/api.py", "from .... import other", "imports are relative"),
        ("__init__.py", "import torch", "the package imports from the rooms only"),
        ("__init__.py", "from .tests import golden_text", "the package imports from the rooms only"),
        ("__init__.py", "from . import runtime", "the package imports from the rooms only"),
    ],
)
def test_an_upward_import_is_found(path: str, source: str, reason: str) -> None:
    (found,) = violations(source, Path(path))
    assert found.startswith(f"{path}:")
    assert reason in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("compiler/api.py", "from ..passes.base import Pass\nfrom ..codegen import names\nfrom .plan import Plan"),
        ("passes/rewrite/coarsen.py", "import torch\nfrom ...ir.ops import ALL\nfrom ..base import Pass"),
        ("runtime/device/runtime.py", "from ...ir.ops import ALL\nfrom ..stage import runner\nfrom .peers import x"),
        ("papers/report.py", "from ..cli.tables import table"),
        ("__init__.py", "from __future__ import annotations\nfrom .compiler.api import compile"),
    ],
)
def test_a_downward_import_is_left_alone(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []
