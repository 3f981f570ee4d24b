"""A job in the user's own process leaves CUDA as the user has set it, and takes what it needs before the first step."""

from __future__ import annotations

import pytest
import torch

from penstock.tests.gpu.rehearsal import batches, compile_job, exact, model_of, session_of

pytestmark = pytest.mark.gpu
__all__ = ["exact"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU, which stays the current one")
def test_the_current_device_stays() -> None:
    data, losses = batches(count=2), {}
    before = torch.cuda.current_device()
    try:
        for device in (0, 1):
            torch.cuda.set_device(device)
            model = model_of()
            with compile_job(model, data[0]) as job:
                losses[device] = [float(job.step(batch)) for batch in data] + [float(job.evaluate(data[0]).loss)]
                job.sync()
            assert torch.cuda.current_device() == device
    finally:
        torch.cuda.set_device(before)
    assert losses[0] == losses[1]


def test_jobs_one_after_another_use_the_same_streams() -> None:
    batch, seen = batches(count=1)[0], []
    for _ in range(3):
        with compile_job(model_of(), batch) as job:
            job.step(batch)
            made = session_of(job).streams.made.values()
            handles = [stream.stream.cuda_stream for stream in made if stream.is_cuda]
            assert len(set(handles)) == len(handles)
            seen.append(set(handles))
    assert seen[0] == seen[1] == seen[2]
