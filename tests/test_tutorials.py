"""The tutorials run, from top to bottom, and every page of the documents has its place on the site."""

from __future__ import annotations

import dataclasses
import json
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
from penstock.cli.config import SECTIONS
from penstock.cli.options import AnswerOptions, PlanOptions, TrainOptions
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.tiny_weights import (
    blocks,
    run_command,
    with_tiny_config,
    with_tiny_weights,
    write_chats,
    write_tiny_model,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CPU = "penstock.Hardware.cpu(num_devices={}, memory={!r}, dram='2GB')"
SSD = "penstock.Hardware.cpu(num_devices=1, dram='1MB', ssd='1GB'), strategy='fuyou'"  # whose states are in files
ONE, TWO = CPU.format(1, "400MB"), CPU.format(2, "200MB")
# Pages that run with tiny weights, and Python for the cards that they name.
CARDS: dict[str, dict[str, str]] = {
    "index": {},
    "tutorials/one_gpu": {"4090": ONE},
    "tutorials/lora_small_card": {"4090": ONE},
    "tutorials/qlora": {"3060": ONE},
    "tutorials/two_cards": {},
    "tutorials/from_deepspeed": {"4090x2": TWO},
    "tutorials/from_unsloth": {"4090": ONE},
    "tutorials/from_axolotl": {},
    "tutorials/troubleshooting": {"auto": ONE},
    "tutorials/ssd": {"4090": SSD},
}
ON_TWO = ["tutorials/two_cards"]


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", slow_but(["index"], CARDS))
def test_the_page_runs(page: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training commands, then its Python: a page that begins with a real model ends with one that loads."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl")
    shown = blocks((DOCS / f"{page}.md").read_text("utf-8"))
    for config in (content for language, content in shown if language == "yaml"):
        (tmp_path / "config.yaml").write_text(with_tiny_config(config, tiny))
    commands = [line for language, content in shown if language == "bash" for line in content.splitlines()]
    for line in commands:
        if line.startswith("penstock train"):
            said = run_command(line, tiny, num_devices=2 if page in ON_TWO else 1)
            assert "model in" in said or "adapter in" in said
    code = code_of(DOCS / f"{page}.md").replace("report_to=[]", "report_to=[], use_cpu=True")
    exec(compile(with_tiny_weights(code, tiny, CARDS[page]), page, "exec"), {"penstock": penstock})


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_from_top_to_bottom(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl")
    notebook = json.loads((ROOT / "examples" / "lora_on_one_card.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = with_tiny_weights("\n".join(cells), tiny, {"4090": ONE})
    names: dict[str, Any] = {}
    exec(compile(code, "lora_on_one_card.ipynb", "exec"), names)
    assert len(names["losses"]) == 2 and (tmp_path / "report.html").exists()
    assert all(not cell.get("outputs") for cell in notebook["cells"])


def test_every_option_of_another_tool_leads_to_one_of_ours() -> None:
    """The second column of a table names keys of a file, options of the command line, or what is left out."""
    text = (DOCS / "tutorials" / "from_axolotl.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    keys = {name for names in SECTIONS.values() for name in names}
    named = [key for _, ours in rows[2:] for key in re.findall(r"`([a-z_]+)(?:: [^`]*)?`", ours)]
    assert len(rows) > 30 and len(named) > 30
    others = {"constant", "linear", "cosine", "fp32"}  # values
    assert [key for key in named if key not in keys | others] == []


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("tutorials/*.md")))
def test_every_option_that_a_tutorial_shows_exists(page: str) -> None:
    text = (DOCS / "tutorials" / f"{page}.md").read_text("utf-8")
    groups: list[Any] = [TrainOptions, PlanOptions, AnswerOptions]
    known = {f"--{field.name.replace('_', '-')}" for group in groups for field in dataclasses.fields(group)}
    known |= {"--full", "--html", "--out", "--rank", "--measure", "--save", "--list", "--json", "--print-config"}
    known |= {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}  # of torchrun
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert sorted({option.replace("--no-", "--") for option in shown} - known) == []


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
def test_the_script_for_hosts_runs_under_torchrun_and_goes_on(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    code = with_tiny_weights(code_of(DOCS / "tutorials" / "hosts.md"), tiny, {"auto": CPU.format(2, "64MB")})
    script.write_text(code, "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script.name]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert re.findall(r"step (\d+), loss", run.stdout) == ["3", "3"]
    assert (tmp_path / "checkpoint").exists() and (tmp_path / "model" / "config.json").exists()
