"""Threads that share jobs: every job runs once, with kernels on one thread, and the first error is the caller's."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.runtime.threads import share_among


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_job_runs_once_and_the_caller_keeps_its_number_of_threads(threads: int) -> None:
    own, seen = torch.get_num_threads(), []
    together = threading.Barrier(threads)  # each thread has a job at the same time as the others

    def run(number: int, job: int) -> None:
        if job < threads:
            together.wait(60)
        seen.append((number, job, torch.get_num_threads(), torch.is_grad_enabled()))

    share_among(threads, range(20), run)
    assert sorted(job for _, job, _, _ in seen) == list(range(20))
    assert {number for number, _, _, _ in seen} == set(range(threads))
    assert torch.get_num_threads() == own
    if threads > 1:
        assert {(count, grad) for _, _, count, grad in seen} == {(1, False)}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_is_raised_when_all_threads_have_ended(threads: int) -> None:
    ended = []

    def run(number: int, job: int) -> None:
        if job == 3:
            raise ArithmeticError("job 3")
        ended.append(job)

    with pytest.raises(ArithmeticError, match="job 3"):
        share_among(threads, range(10), run)
    assert ended[:3] == [0, 1, 2] and (threads == 1 or sorted(ended) == [0, 1, 2, *range(4, 10)])
