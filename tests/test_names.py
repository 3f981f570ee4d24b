"""One word, one thing: no two public classes share a name, and docs/glossary.md speaks of what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from penstock.tests.syntax import tree_of

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ir", "runtime", "graph", "passes", "codegen", "compiler", "data", "training", "integrations", "cli", "papers")
# Names that several files may have, each with the reason.
SHARED: dict[str, str] = {}
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
ENTRY = re.compile(r"^\| \*\*(?P<word>[^*]+)\*\* \| (?P<meaning>.+) \| (?P<place>[^|]*) \|$", re.MULTILINE)


def definitions() -> dict[str, list[str]]:
    """Public name to the files that define a class, or an alias of a type, of that name."""
    found = defaultdict(list)
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in tree_of(file.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(file.relative_to(ROOT).as_posix())
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    name = node.targets[0].id
                    if re.fullmatch(r"[A-Z][a-z]\w*", name):
                        found[name].append(file.relative_to(ROOT).as_posix())
    return found


def test_no_two_public_classes_share_a_name() -> None:
    shared = {name: files for name, files in definitions().items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SHARED} == {}
    assert SHARED.keys() <= shared.keys(), "a name that is no longer shared needs no reason"


def test_the_glossary_is_in_order_and_names_what_exists() -> None:
    entries = [match.groupdict() for match in ENTRY.finditer(GLOSSARY)]
    words = [entry["word"] for entry in entries]
    assert len(words) > 30 and words == sorted(words, key=str.lower)
    assert len(entries) == sum(line.startswith("| **") for line in GLOSSARY.splitlines())
    for entry in entries:
        places = re.findall(r"`([\w/.]+/[\w.]*)`", entry["place"])
        assert places, f"{entry['word']}: no file"
        for place in places:
            assert (ROOT / place).exists(), f"{entry['word']}: {place}"


def test_what_the_glossary_calls_a_class_or_a_pass_is_defined_where_it_says() -> None:
    for entry in (match.groupdict() for match in ENTRY.finditer(GLOSSARY)):
        files = [ROOT / place for place in re.findall(r"`([\w/.]+/[\w.]*)`", entry["place"])]
        source = "\n".join(
            f.read_text("utf-8") for file in files for f in ([file] if file.is_file() else file.rglob("*.py"))
        )
        for name in re.findall(r"`([A-Za-z_][\w.{}=-]*)`", entry["meaning"]):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", source), f"{entry['word']}: {name}"
