"""Ranks under torchrun on two hosts, driven from one script: it sends every rank a line with a name, and each rank runs
the function of that name and answers with a line of JSON.

The lines go through a socket of the file system, which both hosts see, so the link between them carries only training.
A rank's script calls `serve`; the script that drives the ranks holds `Ranks`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.bench.hosts import TwoHosts

CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
START_S = 300.0
STEP_S = 300.0


class Ranks:
    """A script's ranks, with one torchrun on each host. `facts` has what each rank reported when it was ready.

    Raises RuntimeError with the end of the ranks' output if one of them ends early.
    """

    def __init__(self, hosts: TwoHosts, script: Path, settings: Mapping[str, Any], port: int, ranks_per_host: int = 2):
        self.hosts, self.count = hosts, 2 * ranks_per_host
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.log = open(Path(self.folder.name, "log"), "w+")  # noqa: SIM115, closed by `close`
        self.server = socket.socket(socket.AF_UNIX)
        self.agents: list[subprocess.Popen[Any]] = []
        self.files: dict[int, Any] = {}
        path = str(Path(self.folder.name, "ranks"))
        self.server.bind(path)
        self.server.listen(self.count)
        self.server.settimeout(1.0)
        try:
            self.agents = [
                hosts.popen(
                    host,
                    [
                        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}",
                        f"--nproc-per-node={ranks_per_host}", f"--master-addr={hosts.addresses[0]}",
                        f"--master-port={port}", str(script), json.dumps({**settings, "socket": path}),
                    ],
                    env=CALM, stdout=self.log, stderr=subprocess.STDOUT,
                )
                for host in (0, 1)
            ]  # fmt: skip
            self.facts = self._accept()
        except BaseException:
            self.close()
            raise

    def run(self, name: str) -> dict[str, Any]:
        """Run the function of this name on every rank. Returns the mean loss, the wall seconds until the last answer,
        the sum of CPU seconds, the bytes that each host sent to the other, and the largest peak of RAM."""
        before = self.hosts.sent_bytes()
        begin_s = time.perf_counter()
        for file in self.files.values():
            file.write(name + "\n")
            file.flush()
        rows = [self._answer(rank) for rank in sorted(self.files)]
        took_s = time.perf_counter() - begin_s
        sent = [after - b for after, b in zip(self.hosts.sent_bytes(), before)]
        return {
            "loss": statistics.fmean(row["loss"] for row in rows), "took_s": took_s,
            "cpu_s": sum(row["cpu_s"] for row in rows), "sent_bytes": sent,
            "peak_bytes": max(row["peak_bytes"] for row in rows),
        }  # fmt: skip

    def _accept(self) -> list[dict[str, Any]]:
        """Wait for all ranks to be ready."""
        found: dict[int, dict[str, Any]] = {}
        deadline_s = time.monotonic() + START_S
        while len(found) < self.count:
            try:
                connection, _ = self.server.accept()
            except TimeoutError:
                if any(agent.poll() is not None for agent in self.agents) or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the ranks do not start: {self._last_words()}") from None
                continue
            connection.settimeout(STEP_S)
            file = connection.makefile("rw")
            connection.close()  # `file` keeps the connection open
            facts = json.loads(file.readline())
            found[facts["rank"]] = facts
            self.files[facts["rank"]] = file
        return [found[rank] for rank in sorted(found)]

    def _answer(self, rank: int) -> dict[str, Any]:
        line = self.files[rank].readline()
        if not line:
            raise RuntimeError(f"rank {rank} ended: {self._last_words()}")
        return json.loads(line)

    def _last_words(self, characters: int = 3000) -> str:
        """The end of the ranks' output, without torchrun's own after it."""
        return Path(self.log.name).read_text(errors="replace").partition("failed (exitcode")[0][-characters:]

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.server.close()
        for agent in self.agents:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.terminate()  # torchrun passes the signal on to its ranks
                agent.wait(30)
        self.log.close()
        self.folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(sides: Mapping[str, Callable[[], float]], path: str, facts: Mapping[str, Any] | None = None) -> None:
    """A rank's side: `sides` are functions that train one step and return this rank's loss."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    with connection, connection.makefile("rw") as file:
        print(json.dumps({"rank": int(os.environ["RANK"]), **(facts or {})}), file=file, flush=True)
        for line in file:
            before_s = time.process_time()
            loss = sides[line.strip()]()
            cpu_s = time.process_time() - before_s
            print(json.dumps({"loss": loss, "cpu_s": cpu_s, "peak_bytes": _peak_bytes()}), file=file, flush=True)


def _peak_bytes() -> int:
    """The most RAM that this process has held."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
