"""Signals while devices are at work: the call is finished first, so that the job can save, sync and step again.

A second Ctrl-C breaks the call off. Where several ranks run the script, all of them stop after the same step.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ECHO_S = 2.0  # a launcher repeats to its processes the signal that the terminal has already sent them
Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = tuple(int(number) for number in signal.valid_signals())
_get = inspect.unwrap(signal.getsignal)  # `signal` makes an enum of each answer, which takes ten times as long
_set = inspect.unwrap(signal.signal)


@contextmanager
def finishing(call: str) -> Iterator[None]:
    """Run the body to its end; what the script's signal handlers raise meanwhile is raised after it.

    From the second Ctrl-C on it is raised at once. Outside the main thread, which alone gets signals, this does
    nothing, nor to a signal without a handler in Python, or whose handler notes it for all ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(call)
    try:
        held.begin()
        yield
    finally:
        held.end()


class _Held:
    """Calls the script's signal handlers during a call, and holds what they raise. `before`: these handlers."""

    def __init__(self, call: str) -> None:
        self.before: dict[int, Handler] = {}
        self._call, self._interrupts, self._is_over = call, 0, False
        self._errors: list[BaseException] = []

    def begin(self) -> None:
        for number in _NUMBERS:
            handler = _get(number)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), RankInterrupt):
                self.before[number] = handler
                _set(number, self.hold)

    def hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # another handler has raised before this one was put back
            _set(number, self.before[number])
            self.before[number](number, frame)
            return
        self._interrupts += number == signal.SIGINT
        try:
            self.before[number](number, frame)
        except BaseException as error:
            if number == signal.SIGINT and self._interrupts > 1:
                raise
            self._errors.append(error.with_traceback(None))
            if number == signal.SIGINT:
                _say(f"`{self._call}` is finished first; once more breaks it off")

    def end(self) -> None:
        """Put the handlers back and raise what was held."""
        self._is_over = True
        for number, handler in self.before.items():
            if _get(number) == self.hold:  # else a handler or a rank has set another one
                _set(number, handler)
        if self._errors:
            first, *others = self._errors
            for other in others:
                text = f"and later, in another signal handler: {other!r}"
                first.add_note(text) if sys.version_info >= (3, 11) else _say(text)
            raise first


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


def _handler() -> Handler | None:
    """The script's SIGINT handler, also during a call, if it is a function and this thread may replace it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    found = signal.getsignal(signal.SIGINT)
    while isinstance(held := getattr(found, "__self__", None), _Held):
        found = held.before[signal.SIGINT]
    return found if callable(found) else None


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # printing is not safe in a handler
