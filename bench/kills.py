"""Killed and stopped processes: how long until the error, whom it names, and what stays on disk.

A small GPT-2 trains on two local workers, weights and states on SSD. Each worker is killed (SIGKILL) or stopped
(SIGSTOP) at a random moment of each call; then the run goes on from its checkpoint. The script itself is killed, ended
(SIGTERM) and interrupted (Ctrl-C), and so is its whole family of processes.

Run: python bench/kills.py [--rounds N] [--seed N] [--directory SSD]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from penstock.bench.peers import rows
from penstock.compiler.job.job import Job
from penstock.ir.errors import WorkerError
from penstock.tests.compiler.job.ssd_jobs import CROSSED, job_of, on_ssd

TIMEOUT_S = 3.0
HANG_S = 90.0
MODULE = "penstock.runtime.processes.worker"
# It forks for each run, as compiling takes longer than a run.
SCRIPT = """
import os, sys
from pathlib import Path
from penstock.bench.kills import compiled

folder = Path(sys.argv[1])
job, batch = compiled(folder)


def train():
    job.step(batch)
    print("ready", flush=True)
    while True:
        job.step(batch)
        job.save(folder / "checkpoints" / "last")


for _ in sys.stdin:
    child = os.fork()
    if not child:
        try:
            train()
        except BaseException:
            sys.exit(1)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


class Hang(BaseException):
    """A call did not end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="SIGKILL of each worker in each call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=None, help="on an SSD; default: that of temporary files")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="bench-kills-", dir=args.directory) as name:
        folder = Path(name)
        for part in ("disk", "tmp", "checkpoints"):
            (folder / part).mkdir()
        tempfile.tempdir = str(folder / "tmp")
        found = strike_workers(folder, chance, {signal.SIGKILL: args.rounds, signal.SIGSTOP: max(1, args.rounds // 3)})
        found += strike_scripts(folder, chance, args.rounds)
    save(found)


def compile_job(folder: Path) -> tuple[Job, Any]:
    strategy = on_ssd(stages=CROSSED)
    return job_of("gpt2", strategy, [folder / "disk"], num_devices=2, timeout_s=TIMEOUT_S)


def hang(number: int, frame: FrameType | None) -> None:
    raise Hang


# --- workers


def strike_workers(folder: Path, chance: random.Random, signals: Mapping[int, int]) -> list[dict[str, Any]]:
    """One row per worker, call and round: the run is struck, and resumed."""
    job, batch = compile_job(folder)
    checkpoint = folder / "checkpoints" / "last"
    job.step(batch)
    job.save(checkpoint)
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: (job.close(), job.resume(checkpoint)),
        "step": lambda: job.step(batch),
        "evaluate": lambda: job.evaluate(batch),
        "save": lambda: job.save(folder / "checkpoints" / "other"),
        "state_dict": job.state_dict,
        "sync": job.sync,
        "timeline": job.timeline,
        "resume": lambda: job.resume(checkpoint),
    }
    found = []
    lasting_s = {name: duration_s(call) for name, call in calls.items()}
    for how, rounds in signals.items():
        for name, call in calls.items():
            for device in (0, 1) * rounds:
                after_s = chance.uniform(0, lasting_s[name])
                row = strike(call, device, how, after_s)
                job.close()
                row |= {"call": name, "left": left_in(folder)}
                found.append(row)
                print(row, flush=True)
                job.resume(checkpoint)
                job.step(batch)
    job.close()
    return found


def duration_s(call: Callable[[], Any]) -> float:
    begin_s = time.monotonic()
    call()
    return time.monotonic() - begin_s


def strike(call: Callable[[], Any], device: int, how: int, after_s: float) -> dict[str, Any]:
    """Make calls until one fails, as a worker gets a signal meanwhile."""
    struck_s: list[float] = []

    def act() -> None:
        time.sleep(after_s)
        while not (victim := workers().get(device)):  # it has not started yet
            time.sleep(0.01)
        struck_s.append(time.monotonic())
        victim.send_signal(how)

    signal.alarm(int(HANG_S))
    threading.Thread(target=act).start()
    said = "nothing"
    try:
        while True:
            call()
    except Hang:
        named = False
    except WorkerError as error:
        said = str(error)
        word = "SIGKILL" if how == signal.SIGKILL else "SIGSTOP"
        named = error.device == device and f"device {device} " in said and word in said
    except Exception as error:
        said, named = f"{type(error).__name__}: {error}", False
    finally:
        signal.alarm(0)
    seconds = time.monotonic() - struck_s[0] if struck_s else HANG_S
    row = {"what": f"{signal.Signals(how).name} of a worker", "device": device, "seconds": seconds, "named": named}
    return row if named else {**row, "said": said}


def workers() -> dict[int, psutil.Process]:
    """The workers of this process by their devices."""
    found = {}
    for process in psutil.Process().children():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if MODULE in words:
            found[int(words[words.index("--board") + 1].rpartition("board")[2])] = process
    return found


def left_in(folder: Path) -> list[str]:
    """The remains of a run: files on SSD, and temporary files. The next save removes what an earlier one left."""
    parts = [*folder.glob("disk/*"), *folder.glob("tmp/penstock-*")]
    return [str(path.relative_to(folder)) for path in parts]


# --- the script

ENDS = [(how, family) for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) for family in (False, True)]


def strike_scripts(folder: Path, chance: random.Random, rounds: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert script.stdin is not None
    found = [strike_script(script, folder, how, family, chance) for _ in range(rounds) for how, family in ENDS]
    script.stdin.close()
    script.wait()
    return found


def strike_script(
    script: subprocess.Popen[str], folder: Path, how: signal.Signals, family: bool, chance: random.Random
) -> dict[str, Any]:
    """End a run in the middle of its steps, alone or with its workers and its keeper at the same time."""
    child = begin_run(script)
    time.sleep(chance.uniform(0, 0.5))
    processes = [*child.children(recursive=True), child]
    begin_s = time.monotonic()
    for process in processes if family else processes[-1:]:
        process.send_signal(how)
    psutil.wait_procs([child], HANG_S)
    next_start = family and how == signal.SIGKILL  # nobody is left who could remove anything
    if next_start:
        before = left_in(folder)
        child = begin_run(script)
        left = [path for path in before if path in left_in(folder)]
        child.kill()
        processes = [child]
    while still := remains_of(folder, processes):
        if time.monotonic() > begin_s + HANG_S:
            break
        time.sleep(0.02)
    left = left + still if next_start else still
    seconds = time.monotonic() - begin_s
    who = "the script and all its processes" if family else "the script"
    row = {"what": f"{how.name} of {who}", "seconds": seconds, "left": left, "removed_by_next_start": next_start}
    print(row, flush=True)
    return row


def begin_run(script: subprocess.Popen[str]) -> psutil.Process:
    """The process of a run that has made its first step."""
    assert script.stdin is not None and script.stdout is not None
    script.stdin.write("run\n")
    script.stdin.flush()
    said = sorted([script.stdout.readline().strip(), script.stdout.readline().strip()])
    assert said[1] == "ready", said
    return psutil.Process(int(said[0]))


def remains_of(folder: Path, processes: list[psutil.Process]) -> list[str]:
    alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return left_in(folder) + [str(process.pid) for process in alive]


# --- the table


def save(found: list[dict[str, Any]]) -> None:
    for what in dict.fromkeys(row["what"] for row in found):
        own = [row for row in found if row["what"] == what]
        seconds = [row["seconds"] for row in own]
        summary: dict[str, Any] = {
            "what": what,
            "count": len(own),
            "median_s": statistics.median(seconds),
            "most_s": max(seconds),
            "left": sum(bool(row["left"]) for row in own),
        }
        if any("named" in row for row in own):
            calls = dict.fromkeys(row["call"] for row in own)
            summary["named"] = sum(row["named"] for row in own)
            summary["most_s_of_call"] = {c: max(row["seconds"] for row in own if row["call"] == c) for c in calls}
            summary["timeout_s"] = TIMEOUT_S
        rows.save("kills", summary)


if __name__ == "__main__":
    main()
