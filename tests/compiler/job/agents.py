"""Scripts under torchrun agents, one agent for each host, here or in namespaces, and what their ranks wrote."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.bench.hosts import TwoHosts
from penstock.runtime.processes.local import worker_environment

SCRIPT = Path(__file__).with_name("faulty_rank.py")
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@dataclass
class Agents:
    """Running agents and where their ranks write."""

    processes: list[subprocess.Popen[Any]]
    folder: Path

    def wait(self, timeout_s: float) -> list[int]:
        """The exit codes of the agents. Raises `TimeoutExpired`."""
        deadline_s = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in self.processes]

    def results(self) -> dict[int, dict[str, Any]]:
        """The results that each rank wrote, if it did."""
        return {int(p.stem[4:]): json.loads(p.read_text()) for p in self.folder.glob("rank*.json")}

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def await_file(self, name: str, timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not (self.folder / name).is_file():
            assert time.monotonic() < deadline_s, f"no {name}: {self.output()}"
            time.sleep(0.02)

    def output(self) -> str:
        """The output of all agents and ranks."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("agent*.log")))


@contextmanager
def agents(
    folder: Path,
    *words: str,
    nodes: int = 1,
    per_node: int | Sequence[int] = 2,
    script: Path = SCRIPT,
    hosts: TwoHosts | None = None,
    options: Sequence[str] = (),
) -> Iterator[Agents]:
    """Start `script` *words under `nodes` agents, `SCRIPT` with the folder before the words; when the context ends, all
    agents and ranks are killed. The first agent holds the store.

    `hosts`: each agent runs in a namespace of its own. `options`: more for torchrun; `--nnodes` there replaces `nodes`.
    """
    folder.mkdir(exist_ok=True)
    for old in [*folder.glob("rank*.json"), *folder.glob("reached*")]:
        old.unlink()
    endpoint = f"{LOOPBACK if hosts is None else hosts.addresses[0]}:{free_port()}"
    counts = [per_node] * nodes if isinstance(per_node, int) else list(per_node)
    started = []
    try:
        for node, count in enumerate(counts):
            where = LOOPBACK if hosts is None else hosts.addresses[node]
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test", f"--local-addr={where}"]
            command += [f"--rdzv-conf=join_timeout=100,last_call_timeout=1,keep_alive_interval=1,is_host={node == 0}"]
            command += [f"--nnodes={nodes}"] * (not any(o.startswith("--nnodes") for o in options)) + list(options)
            command += [str(script), *([str(folder)] if script == SCRIPT else []), *words]
            environment = worker_environment(1)
            with open(folder / f"agent{node}.log", "ab") as log:
                common: dict[str, Any] = {"stdout": log, "stderr": log}
                if hosts is None:
                    started.append(subprocess.Popen(command, env=environment, start_new_session=True, **common))
                else:
                    started.append(hosts.popen(node, command, env=environment, **common))
        yield Agents(started, folder)
    finally:
        for process in started:
            end_all(process)


def end_all(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started."""
    family = []
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
    for each in [*family, process]:
        if each.is_running() if isinstance(each, psutil.Process) else each.poll() is None:
            os.kill(each.pid, signal.SIGKILL)
    process.wait(10)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
