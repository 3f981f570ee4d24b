"""Pytest plugin: texts compared whole with a file beside the test. Loaded by name from setup.cfg.

    def test_printed_program(golden):
        golden(print_program(program), "two-stages")

compares with `golden/<stem of the test file>/two-stages.txt` next to the test file. `pytest --update-golden` rewrites
the files of the tests it runs; the change then shows in the commit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden texts instead of comparing with them")


def golden_path(test_file: Path, name: str) -> Path:
    """The path of the golden text `name` of a test file. ValueError for a name that is not plain lower case."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"golden name {name!r}: use lower-case letters, digits, '-', '_' and '.', e.g. 'two-stages'")
    return test_file.parent / "golden" / test_file.stem / f"{name}.txt"


def difference(path: Path, text: str) -> str:
    """Empty when the file holds exactly `text`; otherwise a message with a line diff, expected to actual."""
    if not path.exists():
        return f"no golden text {path}; write it with: pytest --update-golden"
    expected = path.read_text(encoding="utf-8")
    if expected == text:
        return ""
    lines = difflib.unified_diff(
        expected.splitlines(keepends=True), text.splitlines(keepends=True), fromfile=str(path), tofile="this run"
    )
    shown = "".join(line if line.endswith("\n") else line + "\n\\ no newline at the end\n" for line in lines)
    return f"{shown}golden text differs; if the change is meant, rewrite it with: pytest --update-golden"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(text, name)` fails unless the golden text `name` of this test file equals `text`."""

    def check(text: str, name: str) -> None:
        path = golden_path(request.path, name)
        if request.config.getoption("--update-golden"):
            write(path, text)
            return
        message = difference(path, text)
        if message:
            pytest.fail(message, pytrace=False)

    return check
