"""SIGKILL of a script that trains on SSD, again and again: each start goes on from the last checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from penstock.runtime.scratch import MARKER
from penstock.tests.compiler.job.ssd_jobs import in_dram, job_of, left_by, on_ssd
from penstock.tests.runtime.ssd.on_disk import directories

# It forks for each run, as importing torch takes longer than a run. A child saves at every other step.
SCRIPT = """
import os, sys
from pathlib import Path
from penstock.tests.compiler.job.ssd_jobs import job_of, on_ssd

strategy, checkpoint, disk = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
job, batch = job_of("gpt2", strategy, [disk], max_grad_norm=0.5)
log = os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND)


def train():
    if (checkpoint / "manifest.json").exists():
        job.resume(checkpoint)
    else:
        job.driver
    os.write(log, f"folders {len(os.listdir(disk))}\\n".encode())
    while True:
        loss = float(job.step(batch))
        os.write(log, f"{job.step_count} {loss!r}\\n".encode())
        if job.step_count % 2:
            job.save(checkpoint)


print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        train()
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def poison(disk: Path) -> int:
    """Fill what a killed run left on SSD with other bytes; returns how many files there were."""
    left = [path for path in disk.rglob("*") if path.is_file() and path.name != MARKER]
    for path in left:
        with open(path, "r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    return len(left)


class KilledRuns:
    """A process of `SCRIPT`, whose runs are killed."""

    def __init__(self, folder: Path, disk: Path, strategy: str):
        self.log, self.disk = folder / "log", disk
        self.log.touch()
        script = folder / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        command = [sys.executable, str(script), strategy, str(folder / "checkpoint"), str(disk), str(self.log)]
        (folder / "tmp").mkdir()
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.child: int | None = None
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def killed_after(self, seconds: float) -> None:
        """One run, killed so long after its devices were ready."""
        assert self.process.stdin is not None
        starts = self.log.read_text().count("folders")
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        self.child = int(self.line())
        deadline = time.monotonic() + 60
        while self.log.read_text().count("folders") == starts:
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.005)
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


@pytest.mark.parametrize(
    ("runs", "clip"),
    [*(pytest.param(25, clip, marks=pytest.mark.slow) for clip in ("exact", "speculative"))],
)
def test_killed_runs_go_on_from_the_last_checkpoint(runs: int, clip: str, tmp_path: Path) -> None:
    """No file of a killed run is read, which would show: they are filled with noise. The next start removes them."""
    (disk,) = directories(tmp_path)
    strategy, when = on_ssd(clip=clip, activations="to=ssd, share=0.7"), random.Random(runs)
    left = 0
    with KilledRuns(tmp_path, disk, strategy) as script:
        for _ in range(runs):
            script.killed_after(when.uniform(0.0, 0.3))
            left += poison(disk)
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert left >= runs and [row[1] for row in rows if row[0] == "folders"] == ["1"] * runs
    losses = {(int(step), loss) for step, loss in (row for row in rows if row[0] != "folders")}
    assert losses, "killed before the first step"

    job, batch = job_of("gpt2", strategy, [disk], max_grad_norm=0.5)
    reference, _ = job_of("gpt2", in_dram(), max_grad_norm=0.5)
    with job, reference:
        if (tmp_path / "checkpoint").exists():
            job.resume(tmp_path / "checkpoint")
        job.step(batch)
        told = [repr(float(reference.step(batch))) for _ in range(job.step_count)]
        assert job.last is not None and repr(job.last.loss) == told[-1]
        wanted = left_by(reference, batch)
        assert all((tensor == wanted[name]).all() for name, tensor in left_by(job, batch).items())
        while len(told) < max(step for step, _ in losses):  # the last run came further than its last checkpoint
            told.append(repr(float(reference.step(batch))))
        assert losses <= set(enumerate(told, 1))
    assert not list(disk.iterdir())
