"""The documents speak of what exists: files, names in them, ops, passes and presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.machine import presets
from penstock.passes.table import PASSES

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PAGES = [
    "README.md",
    "AGENTS.md",
    "docs/tutorials/ssd.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/extensions.md",
    "docs/planner.md",
    "docs/rates.md",
    "docs/schedules.md",
    "docs/compiled_stages.md",
    "docs/reservoir.md",
    "docs/many_hosts.md",
    "docs/fleet.md",
    "docs/asynchronous.md",
    "docs/optimizers.md",
    "docs/security.md",
    "docs/glossary.md",
    "docs/style.md",
    "docs/live.md",
    "docs/logs.md",
    "docs/precision.md",
    "docs/preference.md",
    "docs/adapters.md",
    "bench/README.md",
]
ROOMS = "ir|runtime|graph|passes|codegen|compiler|data|training|integrations|cli|papers"
FILE = re.compile(rf"`((?:{ROOMS}|tests|bench|examples|docs)/[\w./-]*)`")


def section(title: str) -> str:
    """The text under one heading of docs/architecture.md."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", ARCHITECTURE, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    return found[1]


def source_of_named_files(text: str) -> str:
    return "\n".join(Path(ROOT / name).read_text("utf-8") for name in FILE.findall(text) if name.endswith(".py"))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    named = set(FILE.findall((ROOT / page).read_text("utf-8")))
    assert named
    examples_of_a_rule = {"tests/passes/rewrite/test_coarsen.py"} if page == "CONTRIBUTING.md" else set()
    assert [name for name in sorted(named - examples_of_a_rule) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text("utf-8"))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("title", ["How to add an op", "How to add a pass", "How to add a hardware preset"])
def test_every_name_of_a_recipe_stands_in_the_files_that_it_names(title: str) -> None:
    text = section(title)
    source = source_of_named_files(text)
    code = [piece for piece in re.findall(r"`([^`\n]+)`", text) if not FILE.fullmatch(f"`{piece}`")]
    names = {name for piece in code for name in re.findall(r"[A-Za-z_]\w{2,}", piece)}
    assert len(names) > 5
    unknown = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)}
    assert not unknown, f"{title}: {unknown} are in none of the files that the section names"


def test_the_examples_of_the_recipes_are_real() -> None:
    assert "offload" in ops.ALL
    assert {"insert-remat", "partition-balanced"} <= PASSES.keys()
    assert {"laptop-16gb", "rtx4090x4-2rc"} <= set(presets.preset_names())


def test_the_passes_of_the_walk_are_those_of_the_baselines() -> None:
    """Partitioners and mappings that do the same otherwise are left to `compiler/strategies.py`."""
    walk = section("A call to `compile`, file by file")
    named = {name for name in re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", walk) if name in PASSES}
    lines = ("mobius", "gpipe", "1f1b", "data-parallel", "zero3-offload")
    passes = {p.name for line in lines for p in parse_pipeline(line, num_devices=2)}
    assert named >= {name for name in passes if not name.startswith("partition-")} | {"partition-balanced"}


def test_every_class_that_the_walk_names_exists() -> None:
    walk = section("A call to `compile`, file by file")
    rooms = ("compiler", "passes", "graph", "runtime", "ir")
    source = "\n".join(f.read_text("utf-8") for room in rooms for f in (ROOT / room).rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w+)`", walk))
    assert {"Draft", "Plan", "Job"} <= named
    assert [name for name in sorted(named) if not re.search(rf"^class {name}\b", source, flags=re.MULTILINE)] == []
