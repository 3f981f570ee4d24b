"""A script for torchrun: the processes train pairs, one after another, and the first one writes how far from eager.

torchrun --nproc-per-node=N -m penstock.tests.compiler.pair_ranks FILE [NAME ...]

`train_on_ranks` starts it. A row of FILE is the name of a pair with the fields of its `Difference`, or with its error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.runtime.processes.local import worker_environment
from penstock.tests.compiler.pairs import Pair, on_processes, pairs

PATIENCE_S = 600.0  # for one pair; a busy machine takes long


def train_on_ranks(
    chosen: Iterable[Pair], devices: int, told: Callable[[dict[str, Any]], Any] = lambda row: None
) -> list[dict[str, Any]]:
    """Train pairs on so many processes; a row for each, of which `told` hears as soon as it is there. Where one ends or
    holds up the processes, new ones go on after it."""
    left = {pair.name: pair for pair in chosen if pair.devices == devices}
    rows: list[dict[str, Any]] = []
    while left:
        with tempfile.TemporaryDirectory() as folder:
            path, log = Path(folder, "rows.jsonl"), Path(folder, "log")
            path.touch()
            ended = _run(path, log, devices, list(left), lambda row: (rows.append(row), told(row)))
            for row in map(json.loads, path.read_text().splitlines()):
                del left[row["case"]]
            if left:
                row = {"case": next(iter(left)), "error": f"{ended}: {log.read_text(errors='replace')[-1500:]}"}
                del left[row["case"]]
                rows.append(row)
                told(row)
    return rows


def _run(path: Path, log: Path, devices: int, names: list[str], told: Callable[[dict[str, Any]], Any]) -> str:
    """Run the script until it ends, or writes nothing for `PATIENCE_S`; which of the two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}", "-m"]
    with open(log, "wb") as output:
        script = subprocess.Popen(
            [*command, "penstock.tests.compiler.pair_ranks", str(path), *names],
            env=worker_environment(1), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    seen, since_s = 0, time.monotonic()
    try:
        while True:
            is_over = script.poll() is not None
            lines = path.read_text().splitlines()
            for line in lines[seen:]:
                told(json.loads(line))
            if len(lines) > seen:
                seen, since_s = len(lines), time.monotonic()
            if is_over:
                return f"the processes ended with {script.returncode}"
            if time.monotonic() - since_s > PATIENCE_S:
                return f"no answer in {PATIENCE_S:.0f} s"
            time.sleep(0.2)
    finally:
        if script.poll() is None:
            script.terminate()  # torchrun ends its ranks
            script.wait(60)


def main() -> None:
    path, names, rank = sys.argv[1], sys.argv[2:], int(os.environ["RANK"])
    by_name = {pair.name: pair for pair in pairs()}
    for name in names:
        began_s, row = time.monotonic(), {"case": name}
        try:
            found = on_processes(by_name[name], rank, str(Path(path).parent))
            row |= {} if found is None else asdict(found)
        except Exception as error:  # a row, so that the others are tried
            row["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        if rank == 0:
            with open(path, "a") as file:
                file.write(json.dumps({**row, "seconds": round(time.monotonic() - began_s, 2)}) + "\n")


if __name__ == "__main__":
    main()
