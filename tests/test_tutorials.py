"""The tutorials run, from top to bottom, and every page of the documents has its place on the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.tests.shown_elsewhere import slow_but

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUN = ["index", "tutorials/one_gpu", "tutorials/lora_small_card", "tutorials/ssd"]


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL))


def pages_of(nav: Any) -> list[str]:
    """The files that a navigation names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_on_the_site_once() -> None:
    named = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "api.md").read_text("utf-8")
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)}
    assert [name for name in penstock.__all__ if name not in shown] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", slow_but(["index"], RUN))
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)
    run(page)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_about_machines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("tutorials/choose_machine")
    assert "dram0" in capsys.readouterr().out  # the error that the page shows


def run(page: str) -> None:
    """As it stands: a reader who copies it has nothing else."""
    code = code_of(DOCS / f"{page}.md")
    assert "penstock.compile(" in code
    exec(compile(code, page, "exec"), {})


@pytest.mark.slow
@pytest.mark.multi
def test_the_script_for_hosts_runs_under_torchrun_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code_of(DOCS / "tutorials" / "hosts.md"), "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script.name]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert re.findall(r"step (\d+), loss", run.stdout) == ["3", "3"]
    assert (tmp_path / "checkpoint").exists()
