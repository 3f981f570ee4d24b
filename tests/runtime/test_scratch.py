"""Folders that die with their process: nothing of an ended process stays, nothing of anyone else is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.ir.errors import WorkerError
from penstock.ir.machine.links import Link
from penstock.runtime import scratch
from penstock.runtime.device.pacing import LinkClient
from penstock.runtime.emulate.link_server import LinkServer
from penstock.runtime.simulate.sharing import Cost
from penstock.runtime.turns import TurnClient, TurnServer

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import scratch
from pathlib import Path
keeper = scratch.Keeper([sys.argv[2]])
folder = scratch.make(Path(sys.argv[2]), "held")
(folder.path / "file").write_text("text")
print(keeper.process_id, flush=True)
time.sleep(60)
"""


def left_in(directory: Path, name: str = "penstock-0123456789abcdef-gpu0") -> Path:
    """The remains of a killed process: a marked folder that nobody holds, with a file and a folder in it."""
    path = directory / name
    (path / "below").mkdir(parents=True, mode=0o700)
    (path / "below" / "0-stage1.states").write_bytes(bytes(4096))
    (path / "file").write_text("text")
    identity = {"folder": path.name, "inode": path.stat().st_ino}
    (path / scratch.MARKER).write_text(json.dumps(identity))
    return path


def eventually_empty(directory: Path, timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while list(directory.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not list(directory.iterdir())


def test_a_folder_is_private_and_removed_once(tmp_path: Path) -> None:
    with scratch.make(tmp_path, "job") as path:
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        (path / "below").mkdir()
        (path / "below" / "file").write_text("text")
        assert scratch.remove_left([tmp_path]) == [] and path.exists()
    assert not path.exists()
    folder = scratch.make(tmp_path, "job")
    folder.remove()
    folder.remove()
    del folder
    scratch.make(tmp_path, "forgotten")  # nobody holds it
    assert not list(tmp_path.iterdir())


def test_a_fork_leaves_its_parents_folder(tmp_path: Path) -> None:
    folder = scratch.make(tmp_path, "job")
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and folder.path.exists()
    folder.remove()


def test_only_a_marker_makes_a_folder_ours(tmp_path: Path) -> None:
    """A user's folder may have any name, copies and renamed folders are the user's, and a marker holds no surprise."""
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    elsewhere.mkdir()
    left = [left_in(disk), left_in(disk, "penstock-x")]
    named = disk / "penstock-fedcba9876543210-x"
    named.mkdir()
    (named / "results").write_text("a user's")
    copied = Path(shutil.copytree(left[0], disk / "penstock-copy"))
    renamed = left_in(disk, "penstock-then").rename(disk / "penstock-now")
    moved = Path(shutil.copytree(left_in(elsewhere, "penstock-moved"), disk / "penstock-moved"))
    other = left_in(disk, "other")
    kept = [named, copied, renamed, moved, other]
    for number, text in enumerate(("", "[" * 4096, "[]", "{}", "null", '{"folder": 3}', "\xff")):
        kept.append(left_in(disk, f"penstock-text{number}"))
        (kept[-1] / scratch.MARKER).write_text(text, encoding="latin-1")
    for name in ("fifo", "link", "folder"):
        kept.append(left_in(disk, f"penstock-{name}"))
        (kept[-1] / scratch.MARKER).unlink()
    os.mkfifo(disk / "penstock-fifo" / scratch.MARKER)
    (disk / "penstock-link" / scratch.MARKER).symlink_to(left_in(elsewhere) / scratch.MARKER)
    (disk / "penstock-folder" / scratch.MARKER).mkdir()
    link, plain = disk / "penstock-aaaaaaaaaaaaaaaa-gpu0", disk / "penstock-bbbbbbbbbbbbbbbb-gpu0"
    link.symlink_to(left_in(elsewhere, link.name), target_is_directory=True)
    plain.write_text("a file")

    assert sorted(scratch.remove_left([disk, tmp_path / "missing"])) == sorted(left)
    assert not any(path.exists() for path in left)
    assert all((path / "file").exists() for path in kept[1:]) and (named / "results").exists()
    assert link.is_symlink() and (link / "file").exists() and plain.is_file()


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_in(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    assert scratch.remove_left([tmp_path]) == []
    monkeypatch.undo()
    assert scratch.remove_left([tmp_path]) == [left]


def test_what_cannot_be_removed_now_is_still_known_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_in(tmp_path)

    def refuse(path: str) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        scratch.remove_left([tmp_path])
    assert (left / scratch.MARKER).exists()
    assert scratch.remove_left([tmp_path]) == [left] and not left.exists()


def test_no_start_takes_the_folder_of_another_that_is_just_beginning(tmp_path: Path) -> None:
    """A lock belongs to an open descriptor, so threads contend for folders as processes do."""
    made: list[scratch.Scratch] = []
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            scratch.remove_left([tmp_path])

    def begin() -> None:
        made.extend(scratch.make(tmp_path, "gpu0") for _ in range(100))

    clearing, beginning = [threading.Thread(target=clear) for _ in range(2)], threading.Thread(target=begin)
    for thread in (*clearing, beginning):
        thread.start()
    beginning.join()
    stop.set()
    for thread in clearing:
        thread.join()
    assert len(made) == 100
    assert sorted(folder.path for folder in made) == sorted(tmp_path.iterdir())
    for folder in made:
        folder.remove()
    assert not list(tmp_path.iterdir())


def holder(directory: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that holds a folder in `directory`, in a session of its own, and the id of its keeper."""
    code = str(Path(scratch.__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDER, code, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_keeper_removes_what_a_killed_process_leaves(how: signal.Signals, tmp_path: Path) -> None:
    """Also where a service manager sends SIGTERM to all processes at once."""
    users = tmp_path / "penstock-0123456789abcdef-x"
    users.mkdir()
    with scratch.make(tmp_path, "lives") as lives:
        process, keeper = holder(tmp_path)
        if how == signal.SIGTERM:
            time.sleep(0.3)  # until the keeper has begun
            os.kill(keeper, how)
        process.send_signal(how)
        process.communicate(timeout=10)
        assert process.returncode == -how
        deadline_s = time.monotonic() + 10
        while set(tmp_path.iterdir()) != {lives, users} and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert set(tmp_path.iterdir()) == {lives, users}


def test_where_the_keeper_is_killed_too_the_next_start_removes(tmp_path: Path) -> None:
    process, keeper = holder(tmp_path)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=10)
    (left,) = tmp_path.iterdir()
    assert scratch.remove_left([tmp_path]) == [left]


def test_a_keeper_ends_with_its_job(tmp_path: Path) -> None:
    keeper = scratch.Keeper([tmp_path])
    keeper.close()
    keeper.close()
    assert not Path(f"/proc/{keeper.process_id}").exists()


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / ("long_name_of_a_job" * 8)
    folder.mkdir(parents=True)
    assert len(str(folder)) > scratch.SOCKET_BYTES
    return folder


def test_turns_are_handed_out(deep: Path) -> None:
    server = TurnServer(str(deep / "turns"))
    client = TurnClient(server.address, 0)
    for _ in range(2):
        with client.hold(1):
            assert server._server.tokens._taken == {0}
    server.close()


def test_links_are_shared_out_until_the_server_is_gone(deep: Path) -> None:
    server = LinkServer(str(deep / "links"), {"link": Link("link", "a", "b", 1e9, 0.0)}, [[Cost(0.0, ())]])
    client, late = LinkClient(server.address, 0), LinkClient(server.address, 0)
    client.begin(0)()
    server.close()
    for each in (client, late):
        with pytest.raises(WorkerError, match="device 0: the process that shares out the links is gone"):
            each.begin(0)()
