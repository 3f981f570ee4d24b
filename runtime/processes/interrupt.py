"""Ctrl-C while devices are at work: the call is finished first, so that the job can save, sync and step again.

A second Ctrl-C breaks the call off. Where several ranks run the script, all of them stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ECHO_S = 2.0  # a launcher repeats to its processes the signal that the terminal has already sent them


@contextmanager
def finishing(call: str) -> Iterator[None]:
    """Run the body to its end; what the script's SIGINT handler raises meanwhile is raised after it.

    From the second signal on it is raised at once. Outside the main thread, which alone gets signals, where SIGINT has
    no handler in Python, and on a rank that notes signals itself, this does nothing.
    """
    before = _handler()
    if before is None or isinstance(getattr(before, "__self__", None), RankInterrupt):
        yield
        return
    held: list[BaseException] = []
    signals = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        try:
            before(number, frame)
        except BaseException as error:
            if signals > 1:
                raise
            held.append(error.with_traceback(None))
            _say(f"`{call}` is finished first; once more breaks it off")

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            raise held[0]


class RankInterrupt:
    """Notes Ctrl-C on one rank from its start to `end`, as a rank alone cannot stop: the others would wait for it.

    `is_noted` is told to all ranks at the end of a step, and all stop there together. A second signal, later than
    `ECHO_S`, raises KeyboardInterrupt at once. A script with a handler of its own keeps it.
    """

    def __init__(self) -> None:
        self._noted_s: float | None = None
        self._before = _handler()
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    @property
    def is_noted(self) -> bool:
        return self._noted_s is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted_s is None:
            self._noted_s = time.monotonic()
            _say("all ranks stop after this step; once more breaks it off")
        elif time.monotonic() > self._noted_s + ECHO_S:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Raise KeyboardInterrupt; a later Ctrl-C is a first one again."""
        self._noted_s = None
        raise KeyboardInterrupt

    def end(self) -> None:
        if self._before is not None and _handler() == self._note:
            signal.signal(signal.SIGINT, self._before)


def _handler() -> Callable[[int, FrameType | None], Any] | None:
    """The script's SIGINT handler, if it is a function and this thread may replace it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    found = signal.getsignal(signal.SIGINT)
    return found if callable(found) else None


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # printing is not safe in a handler
