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
import json, resource, torch
from penstock.runtime.device.host import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**20) for _ in range(30)]  # 120 MiB, 30720 pages
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
print(json.dumps([kept, [faults() for _ in range(4)]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_freed_once_is_not_faulted_in_again():
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    kept, faults = json.loads(run.stdout)
    if not kept:
        pytest.skip("this C library's malloc cannot be told")
    assert faults[0] > 20_000  # else this test measures nothing
    assert faults[-1] < 2_000  # small blocks in between may make the heap grow once more, not for ever


GROWTH = """
import torch

from penstock.runtime.device.host import Trimmer, keep_freed_memory, resident_bytes

keep_freed_memory()
trimmer, small = Trimmer(), []
trimmer.trim()
first, most = resident_bytes(), 0
for i in range(64):  # no free block is large enough for the next one, as in a first step: 256 MiB
    block = torch.zeros((1 << 20) + 64 * i)
    small.append(torch.zeros(1 << 10))
    del block
    trimmer.trim()
    most = max(most, resident_bytes() - first)
print(most)
"""


def test_freed_blocks_between_small_ones_go_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env=import_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert int(done.stdout) < 64 << 20
