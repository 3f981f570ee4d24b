"""A listener that writes in a thread of its own."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

from ..listener import Listener, OfferRecord, RunFacts, StepRecord

BURST_S = 0.5  # at least, from one burst of writing to the next


class QueuedListener(Listener):
    """Hands over what it is told to its thread. A kind of log provides `open` and the `write_` methods; `open` alone is
    called at once, so that a log that cannot begin stops the run before it has cost anything.

    An error of the thread, such as a full disk, does not end the training: it is warned of once, and the rest is not
    written.
    """

    name = ""  # as users choose it

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.time_s = time.time()  # when it was told what it writes, in seconds since 1970
        self._hurry = threading.Event()  # set while somebody waits for the thread
        self._error: Exception | None = None
        self._told = False

    # --- what a kind provides

    def open(self, run: RunFacts) -> None:
        """Begin the log."""

    def write_step(self, record: StepRecord) -> None:
        """Write one step."""

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of an evaluation."""

    def write_offer(self, offer: OfferRecord) -> None:
        """Write that there is a faster plan."""

    def write_end(self, interrupted: bool) -> None:
        """Write the end, and close what `open` has opened."""

    # --- a listener's

    def begin(self, run: RunFacts) -> None:
        self.open(run)
        self._thread = threading.Thread(target=self._follow, name=f"penstock-log-{self.name}", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        self._put(lambda: self.write_step(record))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        found = dict(metrics)
        self._put(lambda: self.write_evaluation(step, found))

    def offered(self, offer: OfferRecord) -> None:
        self._put(lambda: self.write_offer(offer))

    def end(self, interrupted: bool = False) -> None:
        """Waits until all is written."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        now_s = time.time()
        self._queue.put(lambda: self._attempt(lambda: self.write_end(interrupted), now_s))
        self._queue.put(None)
        self._hurry.set()
        thread.join()
        self._tell()

    def _put(self, write: Callable[[], None]) -> None:
        self._tell()
        if self._thread is not None and self._error is None:
            now_s = time.time()
            self._queue.put(lambda: None if self._error is not None else self._attempt(write, now_s))

    def flush(self) -> None:
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            self._hurry.set()
            done.wait()
            self._hurry.clear()

    def _tell(self) -> None:
        """Warn of the thread's error, once, in the thread of the script."""
        if self._error is not None and not self._told:
            self._told = True
            what = f"{type(self._error).__name__}: {self._error}"
            warnings.warn(f"the log {self.name} in {self.directory} is not written further: {what}", stacklevel=4)

    def _follow(self) -> None:
        """Do what is in the queue, in bursts: to wake up costs the script's other threads more than to write."""
        while (do := self._queue.get()) is not None:
            do()
            if self._queue.empty():
                self._hurry.wait(BURST_S)

    def _attempt(self, write: Callable[[], None], time_s: float) -> None:
        self.time_s = time_s
        try:
            write()
        except Exception as error:
            self._error = self._error or error
