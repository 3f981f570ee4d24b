"""The benchmark of scratch files runs and compares what it says it compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench import ssd_io
from penstock.bench.peers import rows
from penstock.tests.runtime.ssd.on_disk import aligned_memory, directories, make_engine


def test_each_engine_is_measured_against_both_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine("io_uring").close()
    disk = directories(tmp_path)[0]
    saved: list[dict[str, Any]] = []
    monkeypatch.setattr(rows, "save", lambda bench, row: saved.append({"bench": bench, **row}))
    arguments = ["ssd_io.py", "--directory", str(disk), "--size", "16MiB", "--region", "8MiB", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    ssd_io.main()
    cases = ["loop", "loop of 4", "threads", "threads, verify", "io_uring", "io_uring, verify"]
    assert [row["case"] for row in saved] == [case for case in cases for _ in range(2)]
    assert all(row["bytes"] == 16 << 20 and row["runs"] == 2 and row["busy_bytes_per_s"] > 0 for row in saved)
    assert saved[0]["ratio_to_loop"] == 1 == saved[2]["ratio_to_loop_of_4"]
    assert not list(disk.iterdir())


def test_the_plain_loop_moves_the_same_bytes(tmp_path: Path) -> None:
    path = directories(tmp_path)[0] / "file"
    loop = ssd_io.PlainLoop(path, 16 << 20, depth=2)
    source, into = aligned_memory(8 << 20, seed=1), aligned_memory(8 << 20)
    loop.write(8 << 20, source)
    loop.read(8 << 20, into)
    loop.close()
    assert torch.equal(into, source)
    assert path.read_bytes() == bytes(8 << 20) + source.numpy().tobytes()
