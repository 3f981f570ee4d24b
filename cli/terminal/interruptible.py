"""Ctrl-C in a run: the first ends it after the step under way, the second at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ...runtime.processes.interrupt import ECHO_S
from ...runtime.processes.torchrun import TorchrunDriver


@contextmanager
def interruptible(screen: Console) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets, and the end; the second one raises KeyboardInterrupt.

    torchrun passes on a signal that the terminal has already sent to its ranks, so under torchrun a signal that follows
    within `ECHO_S` does not count as a second one.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may take signals
        return

    echo_s = ECHO_S if TorchrunDriver.is_present() else 0.0
    first_s, is_over = 0.0, False

    def take(number: int, frame: object) -> None:
        nonlocal first_s
        if stop.is_set() and time.monotonic() > first_s + echo_s:
            raise KeyboardInterrupt
        if stop.is_set():
            return
        stop.set()
        first_s = time.monotonic()

    def say() -> None:
        stop.wait()
        if not is_over:
            screen.print("stopping after this step; once more stops at once")

    teller = threading.Thread(target=say, name="penstock-stop", daemon=True)  # printing is not safe in a handler
    teller.start()
    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        is_over = True
        stop.set()
        teller.join()
