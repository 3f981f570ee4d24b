"""A job serves one call at a time, to its end, in one state of torch and in its own process: a second one, from another
thread or a signal handler, or one from a fork is refused at once."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...ir.errors import PlanError
from ...runtime.processes.interrupt import finishing
from ..planning import fixed_torch

P = ParamSpec("P")
R = TypeVar("R")


class OneCall:
    """Knows the call that is under way. Calls may come from any thread, one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = ""
        self._process: int | None = None  # that of the first call

    def require_own_process(self, call: str) -> None:
        """Raises `PlanError` in a child that was forked after the first call: the devices answer to its parent."""
        self._process = self._process or os.getpid()
        if os.getpid() != self._process:
            raise PlanError(
                f"job.{call} was called in process {os.getpid()}, a fork of process {self._process} that has the job: "
                "call it there, or compile a job of its own in a process that is spawned, not forked"
            )

    @contextmanager
    def serving(self, call: str) -> Iterator[None]:
        """Wraps a call. Raises `PlanError` if another one is under way: the two would take each other's answers from
        the devices, or wait for ever; and in a forked child."""
        self.require_own_process(call)
        here = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise PlanError(
                f"job.{call} was called in thread {here} while {self._under_way} is under way; a job serves one call "
                "at a time. Make the calls one after another, from any thread; a signal handler or hook only notes "
                "what to do after the call"
            )
        self._under_way = f"job.{call} in thread {here}"
        try:
            yield
        finally:
            self._lock.release()


def one_call(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of an object with a `OneCall` named `calls`, served alone, to its end, and in one state of torch."""

    @functools.wraps(method)
    def serve(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with finishing(method.__name__), self.calls.serving(method.__name__), fixed_torch():
            return method(self, *args, **kwargs)

    return serve
