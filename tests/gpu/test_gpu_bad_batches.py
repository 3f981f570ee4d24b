"""Bad batches on one GPU: numbers out of their bounds reach no kernel, a loss that is not finite undoes the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from penstock.tests.compiler.job.test_bad_batches import ADAMW, Net, batch_of, require_equal, results
from penstock.tests.gpu.rehearsal import compile_job, exact, on_gpu, swapping_job

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

KINDS = ("id", "negative id", "label", "nan", "inf", "dtype")
WAYS: dict[str, Callable[..., Any]] = {
    "resident": partial(compile_job, stages=1),
    "clipped": partial(compile_job, stages=2, max_grad_norm=0.01),
    "swapped": swapping_job,
}


def job_by(way: str) -> Any:
    torch.manual_seed(0)
    net = Net(buffers=False).train()
    net.buffers_change = True  # of the buffer that counts calls; emulated GPUs evaluate no batch norm
    return WAYS[way](net, batch_of(0), optimizer=ADAMW, micro_batches=2)


@pytest.mark.emulated_core
@pytest.mark.parametrize("way", WAYS)
def test_bad_batches_leave_no_trace(way: str) -> None:
    said: list[str] = []
    without = results(job_by(way), [], 3)
    require_equal(results(job_by(way), [*KINDS, *KINDS, *KINDS], 3, said), without)
    assert sum("the loss is nan" in text and "are as before it" in text for text in said) == 6
