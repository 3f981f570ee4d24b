"""The peers of a comparison on a GPU and their start, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.bench.peers.children import Child
from penstock.bench.peers.extensions import BUILDERS, build, ready_to_build
from penstock.bench.peers.gpt import GptSize
from penstock.bench.peers.gpu_setup import Row, Setup, holds, note_call

SCRIPT = Path(__file__).resolve().parent / "gpu_offload_child.py"
LR = 1e-4


class Unavailable(RuntimeError):
    """A peer's needs are not here, and will not be at another try."""


class NoTime(RuntimeError):
    """There are too few seconds to begin."""


Start = Callable[[GptSize, int, int, float], Any]


def peers(device: str, memory_bytes: int | None, directory: str | None) -> dict[str, Start]:
    """The peers' start functions by name. `start(size, rows, micro_batches, limit_s)` is a context of a `Child` that is
    killed after `limit_s`; entering it raises Unavailable if the peer cannot run here, RuntimeError if it fails.

    `memory_bytes` is the GPU memory that each peer may take. `directory` is for files; None if there is no place for
    them.
    """

    def name_of(peer: str) -> Start:
        @contextmanager
        def start(size: GptSize, rows: int, micro_batches: int, limit_s: float) -> Iterator[Child]:
            _require(peer, device, directory)
            with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as folder:
                settings = {
                    "peer": peer, "device": device, "size": asdict(size), "batch": rows, "lr": LR,
                    "micro_batches": micro_batches, "memory_bytes": memory_bytes, "directory": folder,
                    "port": 29600 + os.getpid() % 300,
                }  # fmt: skip
                with start_child(settings, limit_s) as child:
                    yield child

        return start

    return {name: name_of(name) for name in ("fsdp2, all in DRAM", "zero-offload", "zero-infinity")}


@contextmanager
def start_child(settings: dict[str, Any], limit_s: float) -> Iterator[Child]:
    if limit_s < 5:
        raise NoTime("no time was left for it")
    threads = len(os.sched_getaffinity(0))
    clock = _Clock(limit_s)
    try:
        with Child(SCRIPT, settings, threads, on_start=clock.watch) as child:
            yield child
    except RuntimeError as error:
        raise RuntimeError(f"took more than {limit_s:.0f} s" if clock.rang else str(error)) from error
    finally:
        clock.stop()


class _Clock:
    """Kills a process after `limit_s` seconds."""

    def __init__(self, limit_s: float):
        self.rang = False
        self._timer = threading.Timer(limit_s, self._ring)
        self._timer.daemon = True
        self._kill: Callable[[], None] = lambda: None

    def watch(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self._kill()


def extensions(setup: Setup) -> Iterator[Row]:
    """Build what DeepSpeed's peers need, all at once; it stays for them and for calls to come."""
    try:
        _require("zero-offload", setup.device, None)
    except Unavailable as error:
        yield note_call("DeepSpeed's extensions are not built", str(error))
        return
    ready_to_build()
    with ThreadPoolExecutor(len(BUILDERS)) as pool:
        for builder, (took_s, complaint) in zip(BUILDERS, pool.map(build, BUILDERS), strict=True):
            if complaint:
                yield holds("the extension is built", False, builder=builder, error=complaint)
            else:
                yield note_call("seconds until the extension is built and loaded", took_s, builder=builder)


def _require(peer: str, device: str, directory: str | None) -> None:
    if not peer.startswith("zero"):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise Unavailable("No module named 'deepspeed'")
    if device != "cuda":
        raise Unavailable("bench/reservoir.py runs it on a CPU")
    if peer == "zero-infinity" and directory is None:
        raise Unavailable("no directory for files")
