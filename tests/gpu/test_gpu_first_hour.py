"""`bench/gpu_first.py` on GPUs, with tiny sizes: parts of the first two calls, peers, and all GPUs together."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench import gpu_first
from penstock.bench.gpu.device_tests import OVER
from penstock.bench.gpu.ledger import ENDS, FILE
from penstock.bench.peers.exchanges import BY_HOST, GATHER, MEMORY, MESSAGE, SUM
from penstock.bench.peers.extensions import FOLDER, LINKED, ready_to_build
from penstock.bench.peers.gpu_setup import Setup
from penstock.bench.peers.several_gpus import RESIDENT, SWAPPED, several
from penstock.bench.peers.several_ranks import FSDP, PIPELINE

EMULATED = "FAKECUDA_TORCH" in os.environ  # there a process has the number of GPUs that it asks for
EXCHANGES = """
import json, sys
from pathlib import Path
from penstock.bench.peers.exchanges import exchanges
from penstock.bench.peers.gpu_setup import Setup

for row in exchanges(Setup("cuda", small=True, scratch=Path(sys.argv[1]))):
    print(json.dumps(row))
"""
pytestmark = pytest.mark.gpu
NAMED = ("nccl", "tests", "penstock, 24GB", "fsdp2, 24GB")


@pytest.mark.timeout(900)
def test_parts_are_rehearsed(tmp_path: Path) -> None:
    words = ["--small", "--scale", "4", "--out", str(tmp_path), *(f"--part={name}" for name in NAMED)]
    assert gpu_first.main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [row["part"] for row in rows if row["figure"] == ENDS] == list(NAMED)
    assert not [row for row in rows if "error" in row]
    (collectives, tests, _, peer) = ([row for row in rows if row["part"] == name] for name in NAMED)
    assert {row.get("collective") for row in collectives} >= {"all_reduce", "reduce_scatter_tensor"}
    ended = [row for row in tests if row["figure"] == OVER]
    assert ended and not [row for row in ended if row["ok"] is False]
    bound = figure(peer, "step of a peer over the longest of its parts alone")
    # Each micro-batch brings the fp32 weights to the GPU for forward and for backward; gradients return once.
    weights_bytes = 4 * bound["parameters"]
    assert bound["moved_bytes"]["h2d"] == pytest.approx(2 * bound["micro_batches"] * weights_bytes, rel=0.3)
    assert bound["moved_bytes"]["d2h"] == pytest.approx(weights_bytes, rel=0.1)
    assert bound["parts_s"].keys() >= {"computation", "copies to the device", "copies from the device", "optimizer"}
    assert bound["measured"] == pytest.approx(bound["step_s"] / max(bound["parts_s"].values()), rel=1e-2)
    ours = figure(peer, "step of a peer over ours")
    assert ours["measured"] == pytest.approx(ours["step_s"] / ours["our_step_s"], rel=1e-2)


@pytest.mark.multi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_plans_and_peers_on_all_gpus_train_the_same(tmp_path: Path) -> None:
    *sides, _, apart = several(Setup("cuda", small=True, scratch=tmp_path, seconds=540.0))
    assert {row["side"] for row in sides} == {*RESIDENT, *SWAPPED, FSDP, PIPELINE}
    assert all(row["figure"].startswith("seconds of a step") for row in sides) and apart["ok"], (sides, apart)


@pytest.mark.multi
@pytest.mark.parametrize("world", [2, 4])
def test_exchanges_are_timed_by_size_and_communicators_weighed(world: int, tmp_path: Path) -> None:
    if not EMULATED and torch.cuda.device_count() != world:
        pytest.skip(f"needs {world} GPUs")
    emulated = {"FAKECUDA_DEVICES": str(world), "FAKECUDA_NCCL_BUFFERS": "1", "FAKECUDA_NCCL_MB": "8"}
    done = subprocess.run(
        [sys.executable, "-c", EXCHANGES, str(tmp_path)], env=os.environ | emulated, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    timed = [row for row in rows if row["figure"].startswith("seconds of a ")]
    assert all(row["measured"] > 0 and row["predicted_s"] > 0 for row in timed)
    assert all(row["bytes_per_s"] == row["bytes"] / row["measured"] for row in timed)
    names = {exchange: f"seconds of a {exchange}" for exchange in (GATHER, BY_HOST, SUM, MESSAGE)}
    found = Counter((row["figure"], tuple(row["members"]), row["bytes"]) for row in timed)
    every = tuple(range(world))
    members = {GATHER: [every], SUM: [every], BY_HOST: [every] * (world > 2), MESSAGE: [*combinations(every, 2)]}
    assert found == {
        (names[exchange], each, size): 1
        for exchange, several in members.items() for each in several for size in (64 << 10, 1 << 20)
    }  # fmt: skip
    weighed = {(row["figure"], *row["members"]): row["measured"] for row in rows if "planned_bytes" in row}
    assert len(weighed) == len(MEMORY) * (1 if world == 2 else 2)
    if EMULATED:  # two channels of 2 MiB at a sender and 10 MiB at a receiver
        taken = (weighed[(f"bytes of communicators: {words}", *every)] for words in MEMORY.values())
        rest, message, group, gather, sums = taken
        assert rest == group == world * [8 << 20] and message == [4 << 20, 20 << 20, *[0] * (world - 2)]
        assert gather == world * [24 << 20] and sums == world * [0]


def test_linkers_find_the_libraries_that_torch_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("LIBRARY_PATH", "elsewhere")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    ready_to_build()
    ready_to_build()  # as the next part does
    assert os.environ["LIBRARY_PATH"].split(os.pathsep)[-2:] == [str(tmp_path / "linked"), "elsewhere"]
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "{}.{}".format(*torch.cuda.get_device_capability())
    command = ["g++", "-x", "c++", "-", "-shared", "-o", str(tmp_path / "made.so"), "-lcuda", "-lcudart"]
    if shutil.which("g++") is not None:
        subprocess.run(command, input=b"void* made;", check=True)
    for name in LINKED:
        assert ctypes.CDLL(str(tmp_path / "linked" / f"{name}.so"))


def figure(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (row,) = (row for row in rows if row["figure"] == name)
    return row
