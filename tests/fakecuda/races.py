"""Removes one synchronisation at a time from a copy of the code, and counts how many of these races the tests notice.

    tests/fakecuda/fakecuda-run .venv/bin/python tests/fakecuda/races.py [--seeds 3] [--only NAME] > ROWS

A race is caught when a test fails or hangs under some seed, with delays and poison. One JSON line per race.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from penstock.bench.peers.rows import provenance

ROOT = Path(__file__).resolve().parents[2]
ALONE = "tests/gpu/test_gpu_parity.py::test_losses_and_weights_are_eagers[swapped-fp32]"
GIVEN = "tests/gpu/test_gpu_streams.py::test_a_batch_may_lie_on_the_device"
PAIR = "tests/gpu/test_gpu_schedules.py::test_workers_on_two_gpus[1f1b]"
SWAPPED = "tests/gpu/test_gpu_schedules.py::test_workers_on_two_gpus[mobius]"
SHARDS = "tests/gpu/test_gpu_schedules.py::test_workers_on_two_gpus[zero3-offload]"
BY_HOST = "tests/gpu/test_gpu_exchange.py::test_rows_over_nccl"
LIMIT_S = 240
STREAMS, PEERS = "runtime/device/streams.py", "runtime/device/peers.py"


class Race(NamedTuple):
    """`old` stands once in `path`; with `new` in its place the wait is gone."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


RACES = (
    Race("a stream waits for another's event", STREAMS, "self.stream.wait_event(other.end)", "pass", (ALONE,)),
    Race(
        "a loan lasts until its reader is waited for", "runtime/device/issuing.py",
        "while rows and rows[0][0] <= last:", "while rows:", (ALONE, PAIR),
    ),
    Race(
        "a stream's first work waits for the caller's", STREAMS,
        "self.stream.wait_stream(current_stream(self.device))", "pass", (GIVEN,),
    ),
    Race(
        "a thread waits for gradients from the GPU", STREAMS,
        "other.wait()\n                if other.failed:\n                    return False", "pass", (ALONE,),
    ),
    Race(
        "a fetch waits for the optimizer's thread", STREAMS,
        "other.wait()\n                if other.failed:\n                    raise",
        "if other.failed:\n                    raise", (ALONE,),
    ),
    Race(
        "a step waits for the one before", "runtime/device/issuing.py",
        "after += filter(None, map(earlier.events.__getitem__, before))", "pass",
        (ALONE, PAIR),
    ),
    Race(
        "a step's end waits for the streams", STREAMS, "event.wait()\n        stream.board", "stream.board", (ALONE,),
    ),
    Race(
        "the stream waits for a received message", PEERS, "_alias(into)], rank, 0).wait()", "_alias(into)], rank, 0)",
        (PAIR,),
    ),
    Race(
        "the stream waits for a sent message", PEERS, "_alias(value)], rank, 0).wait()", "_alias(value)], rank, 0)",
        (SWAPPED,),
    ),
    Race(
        "the stream waits for a sum", PEERS, "groups[group].allreduce([value], dist.AllreduceOptions()).wait()",
        "groups[group].allreduce([value], dist.AllreduceOptions())", (PAIR, SHARDS),
    ),
    Race(
        "the stream waits for gathered shards", "runtime/device/exchange.py",
        "gather_into(group, rows.view(-1), rows[seats.index]).wait()",
        "gather_into(group, rows.view(-1), rows[seats.index])", (SHARDS,),
    ),
    Race(
        "the stream waits for rows from other hosts and this one", "runtime/torch_names.py",
        "group._end_coalescing().wait()", "group._end_coalescing()", (BY_HOST,),
    ),
    Race(
        "a place in an arena waits for the one before", "ir/program/order.py",
        "[task for first, last, task in self.given_back if first < end and start < last]", "list[int]()", (ALONE,),
    ),
)  # fmt: skip


def copied(race: Race, folder: Path) -> Path:
    """A folder for PYTHONPATH in which `penstock` is a copy of the code without the wait."""
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, folder / "penstock", ignore=unwanted)
    text = (copy / race.path).read_text("utf-8")
    assert text.count(race.old) == 1, f"{race.name}: {race.old!r} stands {text.count(race.old)} times in {race.path}"
    (copy / race.path).write_text(text.replace(race.old, race.new), "utf-8")
    return copy


def caught_by(race: Race, seeds: int, delay_us: int) -> dict[str, object]:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(race, Path(folder))
        for seed in range(1, seeds + 1):
            own = {"FAKECUDA_SEED": str(seed), "FAKECUDA_DELAY_US": str(delay_us), "FAKECUDA_POISON": "1"}
            paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            for test in race.tests:
                command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", test]
                command += [f"--timeout={LIMIT_S}", f"--basetemp={folder}/tmp"]
                environment = {**os.environ, **own, "PYTHONPATH": paths}
                done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
                if done.returncode == 1:
                    said = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
                    row = {"caught": True, "seed": seed, "test": test, "said": " ".join(said[:1])[:200]}
                    return {"race": race.name, **row, "seconds": round(time.monotonic() - begin)}
                assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {"race": race.name, "caught": False, "seeds": seeds, "seconds": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--delay-us", type=int, default=3000)
    parser.add_argument("--only")
    asked = parser.parse_args()
    races = [race for race in RACES if asked.only is None or asked.only in race.name]
    tests = tuple(dict.fromkeys(test for race in races for test in race.tests))
    control = caught_by(Race("none", STREAMS, "class CudaStream(", "class CudaStream(", tests), 1, asked.delay_us)
    if control["caught"]:
        sys.exit(f"a test fails with all waits in place, so it can show no race: {control}")
    for race in races:
        row = {"bench": "races", **caught_by(race, asked.seeds, asked.delay_us)}
        print(json.dumps(row | provenance()), flush=True)


if __name__ == "__main__":
    main()
