"""Processes that are started import nothing because it is in the current directory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.runtime.children import import_environment, start_python
from penstock.tests.runtime.processes.test_worker_faults import eventually, is_running

ROOT = Path(__file__).parents[2]
STARTERS = {"children.py", "scratch.py"}  # the second's keeper runs with -I -S, and imports nothing of ours
NAMES = ("json", "runpy", "torch", "psutil", "liburing", "multiprocessing", "struct", "random")
SCRIPT = """
import subprocess, sys
sys.path = [path for path in sys.path if path]  # as a console script has them
from penstock.runtime.children import start_module, start_python
from penstock.runtime.measure.detect import run_children
from penstock.runtime.ssd.direct_io import why_no_ring

code = "import random; print(random.__name__, sys.argv[1:])"
assert start_python(code, ["a", "b"], stdout=subprocess.PIPE).communicate()[0] == b"random ['a', 'b']\\n"
child = start_module("json.tool", [], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert child.communicate(b"[1]")[0].split() == [b"[", b"1", b"]"]
assert "could not be tried" not in why_no_ring()  # the wheel may be for another processor
try:
    run_children("cpu", [["0"]], threads=1)
except Exception as error:
    assert "not enough values" in str(error), error
"""


@pytest.mark.slow
def test_children_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("open('CANARY', 'w').write(__name__)\nraise SystemExit(7)\n")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {key: value for key, value in import_environment().items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "CANARY").exists()


def test_a_child_may_end_with_its_parent() -> None:
    child = "import os, time; from penstock.runtime.children import end_with_parent; end_with_parent()"
    child += "; print(os.getpid(), flush=True); time.sleep(100)"
    parent = start_python(
        f"from penstock.runtime.children import start_python; start_python({child!r}).wait()",
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    assert is_running(number)
    parent.kill()
    parent.wait()
    assert eventually(lambda: not is_running(number), timeout_s=30)


@pytest.mark.parametrize("room", ["runtime", "compiler", "cli", "papers", "training", "data", "integrations"])
def test_one_file_starts_python(room: str) -> None:
    words = ("sys.executable", "multiprocessing.get_context", "multiprocessing.Process", "ProcessPool")
    files = [file for file in (ROOT / room).rglob("*.py") if any(word in file.read_text("utf-8") for word in words)]
    assert {file.name for file in files} <= STARTERS
