"""SIGKILL of a script in the middle of saves, at once or in the background: the checkpoint found is always a whole one,
and a run goes on from it bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.state import durable
from penstock.runtime.state.checkpoint import find_latest, open_checkpoint
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.killed_runs import KilledRuns
from penstock.tests.compiler.job.test_job_state import job_of
from penstock.tests.shown_elsewhere import slow_but

# Writing goes in small pieces, so that a kill finds it at work; each write says where it is.
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
    job = job_of(model, batch)
    found = find_latest(folder / "saved")
    if found is not None:
        job.resume(found)
    while True:
        loss = float(job.step(batch))
        os.write(log, f"{job.step_count} {loss!r}\\n".encode())
        job.save(folder / "saved" / "c", data={"step": job.step_count}, wait=wait)
"""


@pytest.fixture(params=slow_but(["behind"], ["wait", "behind"]))
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledRuns]:
    (tmp_path / "saved").mkdir()
    with KilledRuns(tmp_path, SCRIPT, request.param) as found:
        yield found


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_killed_save_leaves_the_checkpoint_before_or_the_new_one(script: KilledRuns, runs: int) -> None:
    when, before, left = random.Random(runs), 0, 0
    saved = script.folder / "saved"
    for run in range(runs):
        word, count = ("rename", when.randint(1, 6)) if run % 2 else ("write", when.randint(5, 40))
        script.killed_after(word, count, when.uniform(0.0, 0.004))
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
