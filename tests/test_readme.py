"""Every command of the README runs: those of `console` in `.ci/run`, those of `bash` and both sides of a `diff` here,
with tiny weights; what it shows of a generated file is what is generated."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TrainingArguments

import penstock
from penstock.tests.browser.report_pages import job_of
from penstock.tests.tiny_weights import blocks, run_command, write_chats, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CI = (ROOT / ".ci" / "run").read_text("utf-8")
# Fences whose content is shown, not run. Shell belongs into `console`, where it is checked.
SHOWN_ONLY = {"text", "yaml", "json"}
RUN = {"console", "bash", "diff"}
CPU = 'penstock.Hardware.cpu(num_devices=1, memory="100MB")'


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


MORE = ("make gpu-emulated-core", "make lint docs", "make browser")


@pytest.mark.parametrize("failing", [*console_commands(README), *MORE, ""])
def test_ci_fails_with_any_of_its_commands(failing: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(CI, "utf-8")
    for name in ("make", "penstock"):
        (tmp_path / name).write_text(f'#!/bin/sh\ntest "{name} $*" != "$FAILING"\n', "utf-8")
        (tmp_path / name).chmod(0o755)
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
    unknown = {language for language, _ in blocks(README)} - SHOWN_ONLY - RUN
    assert not unknown, f"fences {unknown} in README.md: write shell as ```console and anything not run as ```text"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model; chats.jsonl is in the present folder."""
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl")
    return write_tiny_model(tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
def test_commands_for_the_visitors_machine_run(tiny: Path) -> None:
    lines = [line for language, content in blocks(README) if language == "bash" for line in content.splitlines()]
    install, *commands = lines
    assert install.startswith("pip install '.[") and commands
    extras = re.findall(r"[a-z]+", install.partition("[")[2])
    assert all(re.search(rf"^{extra} =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE) for extra in extras)
    assert "step 1 of 2: loss" in "".join(run_command(line, tiny) for line in commands)
    assert (Path("out/train/model") / "config.json").exists()


def sides(diff: str) -> tuple[str, str]:
    """The text before and after."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+")  # type: ignore[return-value]


DIFFS = [content for language, content in blocks(README) if language == "diff"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("diff", DIFFS, ids=["trainer", "loop"])
def test_both_sides_of_a_diff_train_the_same_weights(diff: str, tiny: Path) -> None:
    ids = torch.randint(0, 256, (4, 8, 16), generator=torch.Generator().manual_seed(0))
    loader = [{"input_ids": rows, "labels": rows} for rows in ids]
    arguments = TrainingArguments(
        "out", max_steps=3, per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no"
    )
    found = []
    for side in sides(diff):
        model = LlamaForCausalLM.from_pretrained(tiny).train()
        rows = [{"input_ids": row, "labels": row} for row in ids.view(-1, 16)]
        names: dict[str, Any] = {"model": model, "loader": loader, "rows": rows, "training_args": arguments}
        exec(side.replace('"auto"', CPU), {"penstock": penstock, "torch": torch, "partial": partial, **names})
        found.append(model)
    for ours, plain in zip(found[1].parameters(), found[0].parameters()):
        assert torch.allclose(ours, plain, atol=2e-5)  # AdamW divides small gradients, whose sums have another order
    before = LlamaForCausalLM.from_pretrained(tiny)
    assert not torch.allclose(before.lm_head.weight, found[1].lm_head.weight, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_file_that_is_shown_is_the_one_of_the_picture() -> None:
    job, _ = job_of(layers=6, rows=8, width=192, sequence=64, memory="24MB")
    (shown,) = [content for _, content in blocks(README) if "rt.backward(" in content]
    assert len(shown.splitlines()) == 25
    assert shown in job.code(0)


def test_links_to_files_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
