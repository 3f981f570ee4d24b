"""Only `graph/edit.py` writes edges between nodes of a model's graph, so that no edit forgets one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ir.edges import META_EDGES
from penstock.tests.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[2]
EDITOR = "graph/edit.py"
# Rooms and folders that hold graphs of models. Programs are graphs, too, with edges that fx knows.
FOLDERS = ("graph", "codegen", "compiler", "passes/rewrite", "passes/partition", "passes/partition_mixed")
EDITS = {
    "erase_node", "eliminate_dead_code", "replace_all_uses_with", "replace_input_with", "update_arg", "update_kwarg",
    "insert_arg", "_update_args_kwargs",
}  # fmt: skip
WRITES = {"update", "pop", "setdefault", "clear", "popitem"}


def edits(source: str) -> Iterator[tuple[int, str]]:
    """The lines that edit edges between nodes, each with its kind of edit."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in EDITS:
                yield node.lineno, node.func.attr
            elif node.func.attr in WRITES and _is_meta(node.func.value) and _names_edge(node):
                yield node.lineno, f"meta.{node.func.attr}"
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            for target in (part for whole in targets for part in ast.walk(whole)):
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store | ast.Del):
                    if target.attr in ("meta", "args", "kwargs") and not _is_self(target.value):
                        yield node.lineno, f"{target.attr} ="
                elif isinstance(target, ast.Subscript) and _is_meta(target.value) and _is_edge(target.slice):
                    yield node.lineno, "meta[...] ="


def _is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "error", "located")


def _is_edge(key: ast.expr) -> bool:
    """Whether a key may be that of an edge: one of the names, or a name that only the run knows; constants have capital
    letters."""
    if isinstance(key, ast.Constant):
        return key.value in META_EDGES
    return not (isinstance(key, ast.Name) and key.id.isupper())


def _names_edge(call: ast.Call) -> bool:
    keywords = any(keyword.arg is None or keyword.arg in META_EDGES for keyword in call.keywords)
    names = any(isinstance(n, ast.Constant) and n.value in META_EDGES for arg in call.args for n in ast.walk(arg))
    return keywords or names or any(not isinstance(arg, ast.Constant) for arg in call.args)


@pytest.mark.slow
def test_only_the_editor_writes_edges() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = []
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        lines = [f"{name}:{line}: {kind}" for line, kind in edits(file.read_text("utf-8"))]
        assert (name == EDITOR) <= bool(lines), "the editor edits nothing"
        found += lines if name != EDITOR else []
    assert not found, f"only {EDITOR} may edit edges between nodes:\n" + "\n".join(found)


@pytest.mark.slow
def test_the_keys_of_edges_are_listed_once() -> None:
    def names_all(source: str) -> bool:
        nests = (n for n in nodes_of(source) if isinstance(n, ast.Tuple | ast.List | ast.Set))
        texts = ({e.value for e in nest.elts if isinstance(e, ast.Constant)} for nest in nests)
        return any(len(text.intersection(META_EDGES)) > 1 for text in texts)

    files = [file for room in ("ir", *FOLDERS) for file in (ROOT / room).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix() for file in files if names_all(file.read_text("utf-8"))}
    assert found == {"ir/edges.py"}


@pytest.mark.parametrize(
    "line",
    [
        "node.meta['mutates'] = (a,)",
        "node.meta[key] = fx.map_arg(node.meta[key], new)",
        "node.meta.update(alias_of=a)",
        "node.meta.update(meta)",
        "node.meta.pop('eval_args', None)",
        "del node.meta['eval_kwargs']",
        "node.meta = {**other.meta}",
        "node.meta |= {'mutates': ()}",
        "node.args = (a,)",
        "a.args, a.kwargs = args, kwargs",
        "graph.graph.erase_node(node)",
        "old.replace_all_uses_with(new)",
        "user.replace_input_with(old, new)",
    ],
)
def test_an_edit_elsewhere_is_seen(line: str) -> None:
    assert list(edits(line))


@pytest.mark.parametrize(
    "line",
    ["node.meta['val'] = value", "node.meta.update(no_grad=True)", "self.args = args", "x = node.meta['mutates']"],
)
def test_other_writes_are_allowed(line: str) -> None:
    assert not list(edits(line))
