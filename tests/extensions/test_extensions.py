"""A distribution outside of the package adds a pass, a schedule, a preset and an operator, and trains with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import ExtensionError
from penstock.graph.follow.coupling import find_facts
from penstock.graph.follow.rows import RowFacts
from penstock.graph.operators.record import OPERATORS
from penstock.ir.machine import presets
from penstock.passes.table import read_passes
from penstock.tests.passes.running import traced_model

HERE = Path(__file__).parent
# Two micro-batches add their gradients in another order than eager PyTorch adds the rows of one batch.
REORDERED = 1e-6


def install(folder: Path, entry_points: dict[str, dict[str, str]], name: str = "penstock-toys") -> Path:
    """Write what pip leaves of a distribution with these entry points: a folder of metadata."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in rows.items())
        for group, rows in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    return folder


def train(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Train the toy in a process whose path has the distribution, which workers inherit."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    folders = [install(tmp_path, project["entry-points"], project["name"]), HERE, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(HERE / "train_toy.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.multi
def test_a_model_trains_with_what_another_distribution_adds(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["losses"] == pytest.approx(told["expected"], rel=REORDERED)
    assert told["error"] <= REORDERED
    assert told["schedule"] == "one-by-one" and told["hardware"] == "two-toys" and len(told["doubled"]) == 4
    assert f"  products with 2 that are sums: {', '.join(told['doubled'])}" in told["explain"]
    assert any("schedule-one-by-one" in passes for passes in told["tried"])  # the search tries both by itself
    assert any("add-twice" in passes for passes in told["tried"])


def test_rows_meet_in_an_operator_that_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its record they stay apart, so that a batch may be divided into micro-batches."""
    monkeypatch.syspath_prepend(HERE)
    toy, record = import_module("train_toy").Toy(), import_module("penstock_toys.soften").RECORD
    batch = {"x": torch.zeros(4, 16), "labels": torch.zeros(4, 16)}

    def facts() -> RowFacts:
        graph, _ = traced_model(toy, [batch])
        return find_facts(lambda count: graph, [2], 8, "cpu")

    assert any("soften" in str(coupling) for coupling in facts().couplings)
    monkeypatch.setitem(OPERATORS, "toys::soften", record)
    assert not facts().couplings


BAD: list[tuple[str, str, str, str]] = [
    ("penstock.passes", "coarsen", "json:loads", "the name 'coarsen' exists already"),
    ("penstock.passes", "other", "no_such_module:Other", "cannot be loaded: ModuleNotFoundError"),
    ("penstock.passes", "other", "json:loads", "allowed: a subclass of Pass with name = 'other'"),
    ("penstock.schedules", "other", "penstock.passes.rewrite.coarsen:Coarsen", "allowed: a subclass of Schedule"),
    ("penstock.hardware", "rtx4090x2", "json:loads", "the name 'rtx4090x2' exists already"),
    ("penstock.hardware", "mine", "json:no_such_function", "cannot be loaded: AttributeError"),
]


@pytest.fixture
def unread() -> Iterator[None]:
    """Presets are read anew, and once more after the test."""
    presets.extension_presets.cache_clear()
    yield
    presets.extension_presets.cache_clear()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("group", "name", "value", "said"), BAD)
def test_an_entry_that_cannot_be_used_is_named(
    group: str, name: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, {group: {name: value}}))
    with pytest.raises(ExtensionError, match=f"entry point '{name}'.*{group}.*{said}"):
        read_passes()
        penstock.Hardware.preset("laptop-16gb")


def test_two_passes_that_decide_a_field_differently_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_toys.py").write_text(
        "from penstock.passes.base import Pass\n"
        "from penstock.passes.decisions import Decision\n"
        "class Other(Pass):\n"
        "    name = 'other'\n"
        "    decides = (Decision('stages', int, 1),)\n"
    )
    monkeypatch.syspath_prepend(install(tmp_path, {"penstock.passes": {"other": "other_toys:Other"}}))
    with pytest.raises(ExtensionError, match=r"pass 'other' decides 'stages' as .*give the field another name"):
        read_passes()
