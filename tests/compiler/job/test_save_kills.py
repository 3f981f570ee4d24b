"""SIGKILL of a script in the middle of saves, at once or in the background: the checkpoint found is always a whole one,
and a run goes on from it bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.processes.local import worker_environment
from penstock.runtime.state import durable
from penstock.runtime.state.checkpoint import find_latest, open_checkpoint
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.test_job_state import job_of

# It forks for each run, as importing torch takes longer than a run. Writing goes in small pieces, so that a kill finds
# it at work; each write says where it is.
SCRIPT = """
import os, sys
from pathlib import Path
from penstock.runtime.state import durable, tensor_file
from penstock.runtime.state.checkpoint import find_latest
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.test_job_state import job_of

folder, wait = Path(sys.argv[1]), sys.argv[2] == "wait"
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
model, batch = zoo_case("mlp")
write, rename = tensor_file._write_all, Path.rename


def slowly(file, data):
    os.write(log, b"write\\n")
    for start in range(0, len(data), 512):
        write(file, data[start : start + 512])


def loudly(path, target):
    os.write(log, b"rename\\n")
    return rename(path, target)


tensor_file._write_all, Path.rename = slowly, loudly


def train():
    os.setpgid(0, 0)
    job = job_of(model, batch)
    found = find_latest(folder / "saved")
    if found is not None:
        job.resume(found)
    while True:
        loss = float(job.step(batch))
        os.write(log, f"{job.step_count} {loss!r}\\n".encode())
        job.save(folder / "saved" / "c", data={"step": job.step_count}, wait=wait)


print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        train()
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


class KilledSaves:
    """A process of `SCRIPT`, whose runs are killed."""

    def __init__(self, folder: Path, how: str):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        (folder / "saved").mkdir()
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "train.py"), str(folder), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=worker_environment(1),
        )  # fmt: skip
        self.child = 0
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def killed_behind(self, word: str, count: int, seconds: float) -> None:
        """One run, killed so long after it has said a word so often."""
        assert self.process.stdin is not None
        wanted = self.log.read_text().count(word) + count
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        self.child = int(self.line())
        deadline_s = time.monotonic() + 60
        while self.log.read_text().count(word) < wanted:
            assert time.monotonic() < deadline_s and self.process.poll() is None, "it does not save"
            time.sleep(0.0005)
        time.sleep(seconds)
        os.killpg(self.child, signal.SIGKILL)
        self.child = 0
        assert self.line() == "gone"

    def close(self) -> None:
        if self.child:
            os.killpg(self.child, signal.SIGKILL)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(params=["wait", "behind"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledSaves]:
    found = KilledSaves(tmp_path, request.param)
    yield found
    found.close()


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_checkpoint_before_or_the_new_one(script: KilledSaves, runs: int) -> None:
    when, before, left = random.Random(runs), 0, 0
    saved = script.folder / "saved"
    for run in range(runs):
        word, count = ("rename", when.randint(1, 6)) if run % 2 else ("write", when.randint(5, 40))
        script.killed_behind(word, count, when.uniform(0.0, 0.004))
        found = find_latest(saved)
        left += any(path.name.startswith(".c.") for path in saved.iterdir())
        rows = [line.split() for line in script.log.read_text().splitlines() if line[0].isdigit()]
        if found is None:
            assert before == 0 and run == 0
            continue
        progress = open_checkpoint(found, verify=True).progress
        assert before <= progress.step <= int(rows[-1][0]) and progress.data["step"] == progress.step
        assert progress.step >= int(rows[-1][0]) - 2  # a save waits for the one before
        before = progress.step
    assert before > 0 and left, "no kill came in the middle of a save"
    losses = {(int(step), loss) for step, loss in rows}
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        told = [repr(float(job.step(batch))) for _ in range(max(step for step, _ in losses))]
    assert losses <= set(enumerate(told, 1))
    durable.begin(saved / "c")  # the next save removes what is left of the killed ones
    assert len([path for path in saved.iterdir() if ".saving-" in path.name]) == 1
