"""Calls of torchrun's rendezvous store that always end: with an answer or after a timeout.

A store is a connection to a process on some host. If that host, or the network to it, is gone, a call may block for as
long as the kernel retransmits. So a separate thread makes the calls, over its own connection.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ...ir.errors import WorkerError
from ..torch_names import default_store

END_S = 1.0  # how long to wait for the end of a thread that is not blocked
LOOK_S = 0.05  # between two checks whether to go on waiting
LOOPBACKS = ("127.", "::1")
BACKLOG = 1024  # connections of ranks that come at once
T = TypeVar("T")


class Waited(WorkerError):
    """A rank has waited for others in vain; the rank to blame is still unknown."""


class StoreLost(Waited):
    """The store gives no answer: its host, its process or the network to it is gone."""


class StoreThread:
    """Makes calls of `store` one after another. Between them it calls `idle` about every `period_s`."""

    def __init__(self, store: dist.Store, idle: Callable[[dist.Store], None] | None = None, period_s: float = 0.1):
        self.lost = ""  # why no call can be made any more
        self._store, self._idle, self._period_s = store, idle, period_s
        self._queue: SimpleQueue[tuple[Callable[[dist.Store], Any], _Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-store", daemon=True)
        self._thread.start()
        # A thread that returns from the store while the interpreter is ending would abort the process.
        self._end = weakref.finalize(self, _end, self._queue, self._thread)

    def ask(self, call: Callable[[dist.Store], T], timeout_s: float, check: Callable[[], None] | None = None) -> T:
        """The result of `call(store)`. `check` is called repeatedly meanwhile; an error that it raises ends the wait.

        Raises `StoreLost` if there is no answer within `timeout_s`, and for all later calls.
        """
        if self.lost:
            raise StoreLost(self.lost)
        answer = _Answer()
        self._queue.put((call, answer))
        deadline_s = time.monotonic() + timeout_s
        while not answer.done.wait(LOOK_S):
            if check is not None:
                check()
            if time.monotonic() > deadline_s:
                self.lost = f"the rendezvous store {address()} has given no answer for {timeout_s:g} s"
                raise StoreLost(self.lost)
        if answer.error is not None:
            raise answer.error
        return answer.value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Make no more calls. A call that blocks is abandoned."""
        self._end()

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=None if self._idle is None or self.lost else self._period_s)
            except Empty:
                self._look()
                continue
            if task is None:
                return
            call, answer = task
            try:
                answer.value = call(self._store)
            except dist.DistNetworkError as error:
                self._lose(error)
                answer.error = StoreLost(self.lost)
            except Exception as error:
                answer.error = error
            answer.done.set()

    def _look(self) -> None:
        assert self._idle is not None
        try:
            self._idle(self._store)
        except Exception as error:  # a thread that ended without a word would leave all calls to their timeouts
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost = f"the rendezvous store {address()} is gone: {_first_line(error)}"


def _end(queue: SimpleQueue[Any], thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(END_S)


class _Answer:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


def connect_store(timeout_s: float) -> dist.Store:
    """The store of the script's process group if it has one, else torchrun's, which the first rank makes if no agent
    did. Raises `WorkerError` if the store cannot be reached within `timeout_s`, or its port is in use."""
    if dist.is_initialized():
        return another_connection(default_store())
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)
    try:
        if os.environ["RANK"] == "0" and not agent_has_store():
            _serve(host, port)
        return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        used = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
        advice = "; another run, or another program, has that port: choose another MASTER_PORT" if used else ""
        raise WorkerError(
            f"the rendezvous store {address()} cannot be reached: {_first_line(error)}{advice}"
        ) from error


@functools.cache
def _serve(host: str, port: int) -> dist.Store:
    """The store itself, kept for as long as this process lives because other ranks use it again. It listens on the
    address of `host` only, unless other hosts could not reach it there."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if _is_out_of_reach(str(where[0])):
        warnings.warn(
            f"MASTER_ADDR={host} is {where[0]} here, at which other hosts do not reach this one: the rendezvous store "
            "listens on all addresses of this host. Name the address that the other hosts use",
            stacklevel=2,
        )
        return dist.TCPStore(host, port, None, True, wait_for_workers=False)
    listener = socket.create_server(where[:2], family=family, backlog=BACKLOG)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _is_out_of_reach(own: str) -> bool:
    """Whether other hosts cannot reach this one at `own`, its address as it finds it: a loopback address while ranks
    run on other hosts, or the address of a gateway."""
    world = os.environ.get("WORLD_SIZE", "1")
    if own.startswith(LOOPBACKS):
        return os.environ.get("LOCAL_WORLD_SIZE", world) != world
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as probe:
        try:
            probe.bind((own, 0))
        except OSError:
            return True
    return False


def another_connection(store: dist.Store) -> dist.Store:
    """A connection to the same store for another thread, as calls of one connection wait for each other."""
    other: dist.Store = cast(Any, store).clone()  # torch 2.13 has no type of it
    return other


def agent_has_store() -> bool:
    """Whether the store lives in a torchrun agent and so outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def address() -> str:
    """The address of the rendezvous store, as text for people."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def local_address(facing: str) -> str:
    """This host's address on the way to another address or name; empty if there is no way to it."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(facing, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing, only asks for the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
