"""SIGKILL of a script that trains on SSD, again and again: each start goes on from the last checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from penstock.runtime.scratch import MARKER
from penstock.tests.compiler.job.killed_runs import KilledRuns
from penstock.tests.compiler.job.ssd_jobs import in_dram, job_of, left_by, on_ssd
from penstock.tests.runtime.ssd.on_disk import directories

# It saves at every other step.
SCRIPT = """
import os, sys
from pathlib import Path
from penstock.tests.compiler.job.ssd_jobs import job_of, on_ssd

folder, strategy, disk = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
checkpoint = folder / "checkpoint"
job, batch = job_of("gpt2", strategy, [disk], max_grad_norm=0.5)
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)


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
"""


def poison(disk: Path) -> int:
    """Fill what a killed run left on SSD with other bytes; returns how many files there were."""
    left = [path for path in disk.rglob("*") if path.is_file() and path.name != MARKER]
    for path in left:
        with open(path, "r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    return len(left)


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["exact", "speculative"])
def test_killed_runs_go_on_from_the_last_checkpoint(clip: str, tmp_path: Path) -> None:
    """No file of a killed run is read, which would show: they are filled with noise. The next start removes them."""
    (disk,), runs = directories(tmp_path), 25
    strategy, when = on_ssd(clip=clip, activations="to=ssd, share=0.7"), random.Random(runs)
    left = 0
    with KilledRuns(tmp_path, SCRIPT, strategy, str(disk)) as script:
        for _ in range(runs):
            script.killed_after("folders", 1, when.uniform(0.0, 1.0))
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
