"""A script whose runs are killed. It forks for each run, as importing torch takes longer than a run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from penstock.runtime.processes.local import worker_environment

# What a script ends with; it has defined `train`, which goes on until it is killed.
FORKS = """

print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        train()
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


class KilledRuns:
    """A process of a script that gets a folder and more arguments, and writes to the file `log` in it."""

    def __init__(self, folder: Path, script: str, *arguments: str):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        (folder / "tmp").mkdir()
        (folder / "train.py").write_text(script + FORKS)
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "train.py"), str(folder), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**worker_environment(1), "TMPDIR": str(folder / "tmp")},
        )  # fmt: skip
        self.child: int | None = None
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def killed_after(self, word: str, count: int, seconds: float) -> None:
        """One run, killed so long after it has written a word so often to its log."""
        assert self.process.stdin is not None
        wanted = self.log.read_text().count(word) + count
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        self.child = int(self.line())
        deadline_s = time.monotonic() + 60
        while self.log.read_text().count(word) < wanted:
            assert time.monotonic() < deadline_s and self.process.poll() is None, f"it does not say {word}"
            time.sleep(0.0005)
        time.sleep(seconds)
        self.kill()
        assert self.line() == "gone"

    def kill(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            for process in (*psutil.Process(child).children(), psutil.Process(child)):  # its keeper goes first
                process.kill()

    def __enter__(self) -> KilledRuns:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.kill()  # where a run did not get so far
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()
