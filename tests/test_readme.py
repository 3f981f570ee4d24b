"""Every command of the README runs: `console` commands in `.ci/run`, `python` blocks right here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CI = (ROOT / ".ci" / "run").read_text("utf-8")
# Fences whose content is shown, not run. Shell belongs into `console`, where it is checked.
SHOWN_ONLY = {"text", "yaml", "json"}


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block; the language is empty for a bare fence."""
    return re.findall(r"^```([^\n`]*)\n(.*?)^```[ ]*$", text, flags=re.MULTILINE | re.DOTALL)


def console_commands(text: str) -> list[str]:
    """Commands of the `console` blocks: lines that start with `$ `; the others show what is printed."""
    lines = [line for language, content in blocks(text) if language == "console" for line in content.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def executed_lines(script: str) -> list[str]:
    """Commands at the top level of a shell script, also those that run beside the next, as in `make lint &`."""
    lines = [line for line in script.splitlines() if line.strip() and not line.startswith(("#", " ", "\t"))]
    return [line.rstrip().removesuffix(" &") for line in lines]


def test_blocks_and_commands_are_found() -> None:
    text = "a\n```console\n$ make demo\nprinted\n$ make test\n```\nb\n```python\nx = 1\n```\n"
    assert blocks(text) == [("console", "$ make demo\nprinted\n$ make test\n"), ("python", "x = 1\n")]
    assert console_commands(text) == ["make demo", "make test"]


def test_a_command_inside_a_comment_or_a_branch_does_not_count() -> None:
    script = "# make demo\nif x; then\n    make test\nfi\n\nmake lint  \nmake docs &\n"
    assert executed_lines(script) == ["if x; then", "fi", "make lint", "make docs"]


def test_readme_sets_up_with_two_commands() -> None:
    assert {"make demo", "make test"} <= set(console_commands(README))


def test_ci_runs_every_console_command_word_for_word() -> None:
    executed = executed_lines(CI)
    missing = [command for command in console_commands(README) if command not in executed]
    assert not missing, f"README.md shows commands that .ci/run does not execute: {missing}"


@pytest.mark.parametrize("failing", ["make lint docs", "make demo", "make test", ""])
def test_ci_fails_with_any_of_its_commands(failing: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(CI, "utf-8")
    (tmp_path / "make").write_text('#!/bin/sh\ntest "make $*" != "$FAILING"\n', "utf-8")
    (tmp_path / "make").chmod(0o755)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FAILING": failing}
    run = subprocess.run(["bash", tmp_path / ".ci" / "run"], env=environ, capture_output=True)
    assert run.returncode == (1 if failing else 0)
    assert run.stdout.decode().splitlines()[-1].startswith(f"ci: exit status {run.returncode} after")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".pre-commit-config.yaml"])
def test_every_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:[`$:] ?)make ([a-z][a-z-]*)", (ROOT / page).read_text("utf-8")))
    assert named
    assert named <= targets


def test_every_block_is_of_a_kind_that_is_run_or_only_shown() -> None:
    unknown = {language for language, _ in blocks(README)} - SHOWN_ONLY - {"console", "python"}
    assert not unknown, f"fences {unknown} in README.md: write shell as ```console and anything not run as ```text"


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "\n".join(content for language, content in blocks(README) if language == "python")
    assert "penstock.compile(" in source
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "README.md", "exec"), {})
    assert (tmp_path / "out" / "device0.py").exists() and (tmp_path / "tuned").exists()


def test_links_to_files_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
