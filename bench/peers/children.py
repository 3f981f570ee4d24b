"""A peer in a process of its own, which may run another Python. It answers each step with one line of JSON, over pipes.

The peer calls `serve` when it is ready to train; the script that drives it holds a `Child`. This module needs only the
standard library, since the other Python has no Penstock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Otherwise idle threads of several processes spin on the cores that the others need.
CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class Child:
    """A running peer: `step()` trains one step and returns its loss. `facts` is what the peer reported when it was
    ready; `peak_bytes` is the most RAM that its process has held so far. `on_start` gets the function that kills it.

    Raises RuntimeError with the end of the peer's output if the peer ends early.
    """

    def __init__(
        self, script: Path, settings: Mapping[str, Any], threads: int, python: str = sys.executable,
        environment: Mapping[str, str] | None = None, on_start: Callable[[Callable[[], None]], None] | None = None,
    ):  # fmt: skip
        self.peak_bytes = 0
        self.log = tempfile.NamedTemporaryFile("w+", prefix="bench-", suffix=".log")  # noqa: SIM115, closed by `close`
        counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [python, str(script), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, **CALM, **counts, **(environment or {})},
        )  # fmt: skip
        if on_start is not None:
            on_start(self.process.kill)
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def step(self) -> float:
        answer = self._ask("step")
        self.peak_bytes = int(answer["peak_bytes"])
        return float(answer["loss"])

    def moved_bytes(self) -> dict[str, int]:
        """Train one more step; what it moved, as the peer counts it."""
        return self._ask("moved")

    def _ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended: {self._last_words()}")
        return json.loads(line)

    def _last_words(self, lines: int = 3) -> str:
        text = Path(self.log.name).read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in text[-lines:])

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(
    prepare: Callable[[dict[str, Any]], tuple[Callable[[], float], dict[str, Any]]],
    moved_bytes: Callable[[Callable[[], float]], dict[str, int]] | None = None,
) -> None:
    """The peer's side. `prepare(settings)` returns a function that trains one step, and facts; `moved_bytes` calls that
    function and counts.

    The output of libraries goes to standard error, as standard output carries the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    step, facts = prepare(json.loads(sys.argv[1]))
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "moved" and moved_bytes is not None:
            answer: dict[str, Any] = moved_bytes(step)
        else:
            answer = {"loss": step(), "peak_bytes": peak_bytes()}
        print(json.dumps(answer), file=answers, flush=True)


def peak_bytes() -> int:
    """The most RAM that this process has held. (getrusage also counts what the process that started it held.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
