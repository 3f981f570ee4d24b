"""The optimizer leaves cores to those who feed the GPU; freed memory stays with the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.children import import_environment
from penstock.runtime.device.host import available_cores, optimizer_cores, use_cores


def test_a_gpu_alone_has_all_cores_but_two() -> None:
    assert optimizer_cores(range(16), 0, 1) == list(range(2, 16))
    assert optimizer_cores(range(16), 0, 1, most=3) == [2, 3, 4]
    assert optimizer_cores([0, 1], 0, 1) == [1] and optimizer_cores([5], 0, 1) == [5]


@given(st.integers(1, 64), st.integers(1, 8))
def test_gpus_of_a_host_share_no_core_where_there_are_enough(count: int, gpus: int) -> None:
    found = [optimizer_cores(range(count), place, gpus) for place in range(gpus)]
    assert all(found)
    if count >= gpus:
        used = [core for cores in found for core in cores]
        assert len(used) == len(set(used)) and (count == gpus or len(used) < count)


def test_only_the_thread_that_asks_is_kept_to_its_cores() -> None:
    whole, seen = available_cores(), list[set[int]]()

    def work() -> None:
        use_cores(whole[:1])
        inner = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{whole[0]}] and available_cores() == whole


CHILD = """
import ctypes
import json
import resource

import torch

from penstock.runtime.device.host import Trimmer, keep_freed_memory, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, size = ctypes.c_void_p, [ctypes.c_void_p], 1 << 22


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(30)]  # 120 MiB, 30720 pages
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


kept = keep_freed_memory()
counts = [faults() for _ in range(2)]
trimmer, small = Trimmer(), []
trimmer.trim()
first, most = resident_bytes(), 0
for i in range(64):  # no free block is large enough for the next one, as in a first step: 256 MiB
    block = torch.zeros((1 << 20) + 64 * i)
    small.append(torch.zeros(1 << 10))
    del block
    trimmer.trim()
    most = max(most, resident_bytes() - first)
print(json.dumps([kept, counts, most]))
"""


@pytest.mark.slow
def test_freed_memory_stays_but_for_blocks_between_small_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=import_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    kept, counts, most = json.loads(done.stdout)
    assert most < 64 << 20
    if not kept:
        pytest.skip("this C library's malloc cannot be told")
    assert counts[0] > 20_000  # else this test measures nothing
    assert counts[1] < 2_000  # nothing is faulted in again
