"""Forks of a process that has done the imports: as good as new processes, and gone with whoever asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ir.errors import WorkerError
from penstock.runtime import forks
from penstock.runtime.children import start_python
from penstock.runtime.forks import Fork
from penstock.runtime.processes.local import worker_environment
from penstock.tests.runtime.processes.test_worker_faults import eventually, is_running

pytestmark = pytest.mark.multi
MODULE = "penstock.tests.runtime.fork_module"
SCRIPT = """
import os, sys, threading
from penstock.runtime import forks
from penstock.runtime.processes.local import worker_environment

reading, writing = os.pipe()
fork = forks.fork(sys.argv[1], ["wait"], [writing], os.open(os.devnull, os.O_WRONLY), worker_environment(1))
if os.fork() == 0:  # as a loader of data may: it has the script's files, and outlives it
    os.close(1)
    os.execvp("sleep", ["sleep", "60"])
print(fork.pid, forks._servers[-1]._process.pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def no_server_stays() -> Iterator[None]:
    yield
    for server in forks._servers:
        if server.key[0] == MODULE:  # type: ignore[index]
            server.close()


def fork_to(path: Path, how: str, num_threads: int = 1) -> Fork:
    """A fork that has begun, with its output in a file."""
    reading, writing = os.pipe()
    with path.open("wb") as output:
        fork = forks.fork(MODULE, [how], [writing], output.fileno(), worker_environment(num_threads))
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    os.close(reading)
    return fork


def text_of(fork: Fork, path: Path) -> list[str]:
    assert fork.wait(60) is not None
    return path.read_text().split("\n")[0].split()


def test_forks_of_one_process_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sessions, output, environment and ends are their own; the imports were done once."""
    waiting = fork_to(tmp_path / "waiting", "wait")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "any")
    coded, raising = fork_to(tmp_path / "coded", "7", num_threads=3), fork_to(tmp_path / "raising", "raise")
    assert coded.wait(60) == 7 and raising.wait(60) == 1 and waiting.poll() is None
    waiting.kill()
    waiting.kill()  # once more does nothing
    assert waiting.wait(60) == waiting.poll() == -signal.SIGKILL
    waiting.kill()
    rows = [text_of(each, tmp_path / name) for name, each in (("waiting", waiting), ("coded", coded))]
    assert rows[0][0] == rows[1][0] and rows[0][4:] == ["1", "wait"] and rows[1][4:] == ["3", "7"]
    assert all(pid == session != prepared for prepared, pid, session, *_ in rows)
    assert (tmp_path / "coded").read_text().endswith("to stderr\n")
    assert "ValueError: no such thing" in (tmp_path / "raising").read_text()


def test_a_changed_script_has_new_imports_and_the_old_forks_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forks have the variables, umask and folder that the script has now."""
    first = fork_to(tmp_path / "first", "wait")
    old = forks._servers[-1]
    monkeypatch.setenv("FORKS_TEXT", "new")
    second = fork_to(tmp_path / "second", "0")
    assert text_of(second, tmp_path / "second")[3] == "new" and first.poll() is None and old.is_running()
    first.kill()
    assert text_of(first, tmp_path / "first")[3] == "None" and eventually(lambda: not old.is_running())
    key = forks._inheritance(worker_environment(1))
    mask = os.umask(0o027)
    try:
        assert forks._inheritance(worker_environment(1)) != key
    finally:
        os.umask(mask)
    assert forks._inheritance(worker_environment(1)) == key == forks._inheritance(worker_environment(2))
    monkeypatch.chdir(tmp_path)
    assert forks._inheritance(worker_environment(1)) != key


def test_imports_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKS_FAIL", "1")
    with pytest.raises(WorkerError, match=r"exit code 1:\n(?s:.*)ImportError: nothing works here"):
        fork_to(tmp_path / "failing", "0")


def test_forks_of_a_killed_server_are_lost_and_the_next_has_a_new_one(tmp_path: Path) -> None:
    first = fork_to(tmp_path / "first", "wait")
    server = forks._servers[-1]
    os.kill(server._process.pid, signal.SIGKILL)
    assert first.wait(60) == forks.LOST and eventually(lambda: not server.is_running())
    os.kill(first.pid, signal.SIGKILL)  # a worker ends by itself: it looks at its parent
    assert fork_to(tmp_path / "second", "5").wait(60) == 5


@pytest.mark.slow
def test_the_server_ends_with_a_killed_script() -> None:
    """Also while a process that the script has forked has the script's side of the channel."""
    script = start_python(SCRIPT, [MODULE], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert script.stdout is not None
    fork, server = (int(text) for text in script.stdout.readline().split())
    assert is_running(fork) and is_running(server)
    script.kill()
    assert eventually(lambda: not is_running(server))
    os.kill(fork, signal.SIGKILL)
    os.killpg(script.pid, signal.SIGKILL)
    script.communicate()
