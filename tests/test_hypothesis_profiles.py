"""Property-based tests repeat themselves by default, and try others, and more, when asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = "penstock.tests.hypothesis_profiles"
TEST = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=20)
@given(st.integers(0, 10**9))
def test_drawn(number):
    print("drawn", number)
"""


def draw(folder: Path, *arguments: str) -> list[str]:
    """The examples that a run of pytest in `folder` tries."""
    (folder / "test_drawn.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith("drawn")]


@pytest.mark.slow
def test_the_same_examples_are_tried_again(tmp_path: Path) -> None:
    first = draw(tmp_path)
    assert len(first) == 20 and draw(tmp_path) == first


@pytest.mark.slow
def test_a_random_run_tries_others_and_more_and_can_be_repeated(tmp_path: Path) -> None:
    random = ("--hypothesis-profile", "random", "--examples", "3", "--hypothesis-seed")
    seven, eight, again = (draw(tmp_path, *random, seed) for seed in ("7", "8", "7"))
    assert len(seven) == len(eight) == 60 and seven == again != eight
