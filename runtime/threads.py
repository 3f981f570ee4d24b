"""Threads that share one list of jobs, each with torch's kernels on itself alone.

Kernels on pieces of memory that stay in a core's caches take some 100 us. Where each is divided among threads, waking
them takes a good part of that; where each thread has pieces of its own, they wait for each other once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")


def share_among(threads: int, jobs: Iterable[T], run: Callable[[int, T], None]) -> None:
    """Call `run` with a thread's number and a job, for every job: with one thread in the caller's own, with N in N
    others, which all have ended when this returns. The first error is raised; its thread's other jobs are left."""
    todo = iter(tuple(jobs))  # threads may take turns at a tuple's iterator
    if threads == 1:
        _work(0, todo, run)
        return
    done = [_team(threads).submit(_work, number, todo, run) for number in range(threads)]
    errors = [error for future in done if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _work(number: int, todo: Iterator[T], run: Callable[[int, T], None]) -> None:
    for job in todo:
        run(number, job)


@lru_cache(maxsize=4)
def _team(threads: int) -> ThreadPoolExecutor:
    """Threads on the cores of the one that asks first."""
    own = torch.get_num_threads()
    ready = Barrier(threads + 1)
    team = ThreadPoolExecutor(threads, "optimizer", initializer=_alone)
    for _ in range(threads):
        team.submit(ready.wait)  # each occupies a thread, so that all begin now
    ready.wait()
    torch.set_num_threads(own)  # the number is the process's as well, until each thread has its own
    return team


def _alone() -> None:
    torch.get_num_threads()  # a thread's first use would else overwrite the number set next
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
