"""All tests for a GPU in one run of pytest with `tests/gpu/disturbed.py`; each test's end is a row, at once.

A later run leaves out the tests that passed, or were skipped, and those that failed, or never ended, twice. Where
pytest-xdist is installed and there are many cores, `PROCESSES` of them share the GPU: a test is mostly host code.
The limit of the part ends them then, as each would begin a test until its own end."""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench.gpu.machine import is_emulated
from penstock.bench.peers.gpu_setup import Row, Setup, holds, note_call

ROOT = Path(__file__).resolve().parent.parent.parent
BEGUN, OVER = "a test begins", "a test passes"
MOST_S = 150  # of one test
SHARE = 0.95  # of the part's time, after which no test begins
TWICE = 2
MOST_LETTERS = 1000  # of what a failed test found
PROCESSES = 12
LEFT_OUT = "PENSTOCK_LEFT_OUT"  # a file with the tests to leave out, a line each: pytest's processes read it


class Recorder:
    """A plugin of pytest: leaves out tests by `earlier` rows, reports the others to `write`, and begins none after
    `end_s` of time.monotonic(). `open`: tests that have not passed, at the end those that a later run should run."""

    def __init__(self, earlier: Sequence[Row], write: Callable[[Row], object], end_s: float = float("inf")):
        self.write, self.end_s, self.open = write, end_s, set[str]()
        begun = Counter(row["test"] for row in earlier if row["figure"] == BEGUN)
        last = {row["test"]: row["ok"] for row in earlier if row["figure"] == OVER}
        passed = {test for test, ok in last.items() if ok is not False}
        self.given_up = {test for test, times in begun.items() if times >= TWICE} - passed
        self.left_out = passed | self.given_up

    @pytest.hookimpl(trylast=True)  # after what leaves out tests
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.note_tests(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist, whose processes collect the same tests each
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self.open:
            self.note_tests(ids)

    def note_tests(self, tests: Iterable[str]) -> None:
        self.open = set(tests)
        self.write(note_call("tests to run, and left out as they ran before", [len(self.open), len(self.left_out)]))

    def pytest_runtest_protocol(self, item: Any) -> None:
        if time.monotonic() > self.end_s:
            pytest.exit("the time is over", returncode=int(pytest.ExitCode.TESTS_FAILED))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(note_call(BEGUN, None, test=nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        facts: Row = {"test": report.nodeid, "seconds": report.duration}
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.write(note_call(OVER, "skipped", why=why, **facts))
            self.open.discard(report.nodeid)
            return
        words = {} if report.passed else {"why": _reason(report.longrepr)}
        self.write(holds(OVER, report.passed, **words, **facts))
        if report.passed:
            self.open.discard(report.nodeid)
        if report.failed and _is_broken():
            pytest.exit("the GPU is in error: another process goes on after this test", returncode=3)


def run(earlier: Sequence[Row], write: Callable[[Row], object], setup: Setup) -> None:
    """Run the tests that `earlier` rows do not leave out, and write their rows, in this thread, which must be the main
    one. Raises RuntimeError if some have not passed: the part has failed, and is tried again."""
    recorder = Recorder(earlier, write, time.monotonic() + SHARE * setup.seconds)
    marks = "gpu and not real_gpu" if setup.on_gpu and is_emulated() else "gpu"
    places = ["tests/gpu/test_gpu_own_process.py"] if setup.small else ["tests"]
    words = ["-m", marks, "-q", "-p", "no:cacheprovider", "-p", "penstock.tests.gpu.disturbed", f"--timeout={MOST_S}"]
    words += ["--ignore", str(ROOT / "tests/gpu/test_gpu_first_hour.py")]  # which would run all of this once more
    words += ["--rootdir", str(ROOT), "-c", str(ROOT / "setup.cfg"), *(str(ROOT / place) for place in places)]
    words += ["-p", "penstock.bench.gpu.left_out"]
    if importlib.util.find_spec("xdist") is not None and len(os.sched_getaffinity(0)) > PROCESSES:
        words += ["-n", str(PROCESSES)]
    os.environ[LEFT_OUT] = str(setup.scratch / "left_out")
    Path(os.environ[LEFT_OUT]).write_text("\n".join(recorder.left_out))
    status = int(pytest.main(words, plugins=[recorder]))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with exit code {status}")
    if recorder.open or recorder.given_up:
        raise RuntimeError(f"{len(recorder.open)} tests have not passed yet, {len(recorder.given_up)} failed twice")


def _reason(longrepr: Any) -> str:
    """The place where a test failed, and its finding there: a later reader has this row only."""
    place = str(longrepr).strip().splitlines()[-1]
    crash = getattr(longrepr, "reprcrash", None)
    return place[:300] if crash is None else f"{place[:300]}: {crash.message[:MOST_LETTERS]}"


def _is_broken() -> bool:
    """Whether the GPU answers with an error from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
