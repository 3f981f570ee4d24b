"""Pytest plugin: every test with streams that are late at random and with poisoned memory, on a real GPU too.

A missing wait then gives wrong numbers. Of the tasks that a device runtime issues, a share waits up to DELAY_US on its
CUDA stream, after the events that it must wait for and before its kernels; what follows without waiting for it runs
too early. Memory that torch hands out uninitialised holds NaN, in the order of the stream that takes it: a block that
is taken again while another stream still reads it is overwritten under the reader. Devices in processes of their own
are not disturbed.

Run: pytest -m gpu -p penstock.tests.gpu.disturbed [PENSTOCK_GPU_SEED=1]
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.runtime.device.streams import CudaStream, Event, StreamTask

DELAY_US = 500
SHARE = 0.3
CYCLES_PER_US = 1500  # of a GPU's clock


@pytest.fixture(autouse=True)
def disturbed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only tests that are marked gpu, and not those that ask for speed."""
    if request.node.get_closest_marker("gpu") is None or request.node.get_closest_marker("real_gpu") is not None:
        yield
        return
    seed = os.environ.get("PENSTOCK_GPU_SEED", "1")
    made, issue = random.Random(f"{seed} {request.node.nodeid}"), CudaStream.issue

    def issue_late(self: CudaStream, task: StreamTask, *rest: Any) -> Event:
        cycles = int(made.random() * DELAY_US * CYCLES_PER_US) if made.random() < SHARE else 0

        def late() -> None:
            torch.cuda._sleep(cycles)
            task()

        return issue(self, late if cycles else task, *rest)

    monkeypatch.setattr(CudaStream, "issue", issue_late)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # without it nothing is filled
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
