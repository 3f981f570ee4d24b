"""What the tests for a GPU share: which device they run on, models, jobs.

They need CUDA and are skipped without it. With PENSTOCK_REHEARSE_GPU=1 they run on a CPU device instead, without the
parts that only a GPU has, so that the tests themselves can be tried anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.bench.gpu.machine import is_emulated
from penstock.bench.peers import gpu_sections, parity
from penstock.bench.peers.gpt import MEDIUM, GptSize, batch_of, gpt
from penstock.tests.gpu.operator_memory import HAS_DOCUMENTS

REHEARSED = os.environ.get("PENSTOCK_REHEARSE_GPU") == "1"
DEVICE = "cpu" if REHEARSED else "cuda"
on_gpu = [] if REHEARSED else [pytest.mark.gpu]  # for `pytestmark`
only_on_gpu = pytest.mark.skipif(REHEARSED, reason="there is nothing to rehearse")
needs_documents = pytest.mark.skipif(not HAS_DOCUMENTS, reason="this torch has no attention within documents")

SIZE = GptSize(layers=4, width=64, heads=4, vocabulary=256, length=32)
# Large enough that torch's allocator rounds little; for emulated GPUs, small where CPUs multiply bf16 one by one.
WIDE = GptSize(layers=4, width=256, heads=4, vocabulary=2048, length=128) if is_emulated() else MEDIUM
DROPPING = GptSize(layers=4, width=64, heads=4, vocabulary=256, length=32, dropout=0.1)
SETUP = gpu_sections.Setup(DEVICE, small=True, scratch=Path("/nonexistent"))


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Deterministic kernels, and nothing left over from an earlier test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if REHEARSED else threads)
    parity.exact_arithmetic()
    SETUP.tidy()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def batches(size: GptSize = SIZE, rows: int = 4, count: int = parity.STEPS) -> list[dict[str, Tensor]]:
    return [batch_of(size, rows, seed) for seed in range(count)]


def model_of(size: GptSize = SIZE) -> nn.Module:
    return gpt(size)


def compile_job(model: nn.Module, batch: Mapping[str, Tensor], stages: int = 1, **options: Any) -> penstock.Job:
    return gpu_sections.compile_job(SETUP, model, batch, stages=stages, **{"optimizer": parity.SGD, **options})


def swapping_job(model: nn.Module, batch: Mapping[str, Tensor], **options: Any) -> penstock.Job:
    return gpu_sections.swapping_job(SETUP, model, batch, **{"optimizer": parity.SGD, **options})


KINDS = {"resident": compile_job, "2 stages": partial(compile_job, stages=2), "swapped": swapping_job}


def session_of(job: penstock.Job) -> Any:
    """The session of a job's only device."""
    return job.driver.session  # type: ignore[attr-defined]
