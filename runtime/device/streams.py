"""The streams of one device: each runs its tasks one after another, in the order in which they were issued.

`ThreadStream` is a thread with a queue (everything of a CPU device, and what a CUDA device does on the host),
`CudaStream` a stream of a GPU, `InlineStream` the calling thread. All have one interface: `issue` takes a task and
the events it must wait for and returns the task's own event; nothing else synchronises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from ..accelerator import GpuEvent, current_stream, give_stream, set_stream, take_stream, timed_event, use_gpu
from .host import use_cores

SWITCH_S = 0.0005  # how long a thread may keep the interpreter: a stream's thread needs it briefly, but at once
StreamTask = Callable[[], None]


class Label(Protocol):
    """The facts about a task's op that a stream needs."""

    line: int  # 1-based, in the generated file


class Fault(Exception):
    """A task of a stream raised; `error` is what it raised, `label` the op it belongs to, in the step number `step`."""

    def __init__(self, label: Any, error: BaseException, step: int | None = None):
        super().__init__(str(error))
        self.label = label
        self.error = error
        self.step = step
        self.time_s = time.perf_counter()


class HostEvent:
    """Set once, when a task on a thread is over; `failed` if that task, or one that it needed, raised."""

    __slots__ = ("done", "failed", "number", "stream", "waiters")

    def __init__(self, stream: Any):
        self.stream = stream
        self.number = -1  # of the task's op, if whoever issued it numbers ops
        self.done = False
        self.failed = False
        self.waiters: list[Any] = []

    def wait(self) -> None:
        if self.done:
            return
        lock = threading.Lock()
        lock.acquire()
        self.waiters.append(lock)
        if not self.done:  # else `set` may have passed the list already
            lock.acquire()

    def set(self) -> None:
        self.done = True
        for lock in self.waiters:
            lock.release()

    def tell(self, notices: SimpleQueue[Any]) -> None:
        """Put this event into `notices` once the task is over."""
        waiter = _Notice(notices, self)
        self.waiters.append(waiter)
        if self.done:  # `set` may have passed the list already; twice does no harm
            waiter.release()


class _Notice:
    """Is put among the locks of the threads that wait for an event."""

    __slots__ = ("event", "notices")

    def __init__(self, notices: SimpleQueue[Any], event: HostEvent):
        self.notices, self.event = notices, event

    def release(self) -> None:
        self.notices.put(self.event)


class CudaEvent:
    """The end of a task on a CUDA stream. Never failed: such a task raises when it is issued.

    `issued_s`, `end_s`: when the host issued the task, and when it was over, in seconds of `time.perf_counter`; the
    second is known once the step is over. `after`: the tasks of other CUDA streams that it waited for.
    """

    __slots__ = ("after", "end", "end_s", "issued_s", "number", "stream")
    failed = False

    def __init__(self, stream: CudaStream):
        self.stream = stream
        self.number = -1  # as that of a `HostEvent`
        self.end = timed_event(blocking=True)
        self.issued_s = self.end_s = 0.0
        self.after: Sequence[CudaEvent] = ()

    @property
    def done(self) -> bool:
        return bool(self.end.query())

    def wait(self) -> None:
        """Block the calling thread, not the device, until the task is over."""
        self.end.synchronize()


Event = HostEvent | CudaEvent


@dataclass(eq=False)
class StreamRecord:
    """The tasks of one step on one stream: label, start and end in seconds of `time.perf_counter`."""

    step: int = 0
    spans: list[tuple[Any, float, float]] = field(default_factory=list)


class Stream:
    """The base of all streams; `record`: the tasks issued since `begin`. While it grows, tasks of the step before may
    still run, and belong to the record of that one."""

    is_cuda = False

    def __init__(self, name: str):
        self.name = name
        self.record = StreamRecord()

    @property
    def spans(self) -> list[tuple[Any, float, float]]:
        return self.record.spans

    def begin(self, step: int = 0) -> None:
        """Assign all tasks issued from here on to the step of this number."""
        self.record = StreamRecord(step)

    def issue(self, task: StreamTask, waits: Iterable[Event], label: Label) -> Event:
        """Run `task` once all that was issued before it and all of `waits` are over; do not wait for it here."""
        raise NotImplementedError

    def finish(self, notices: SimpleQueue[Any]) -> None:
        """Put this stream into `notices` once all that was issued so far is over."""
        raise NotImplementedError

    def close(self) -> None:
        """Take no more tasks. A thread ends after its last task."""


class InlineStream(Stream):
    """Runs every task at once on the calling thread: no other stream could overlap with it anyway."""

    def __init__(self, name: str, board: MutableSequence[int], slot: int):
        super().__init__(name)
        self.board, self.slot = board, slot

    def issue(self, task: StreamTask, waits: Iterable[Event], label: Label) -> Event:
        event = HostEvent(self)
        for other in waits:
            other.wait()
            if other.failed:
                event.failed = event.done = True
                return event
        self.board[self.slot] = label.line
        start_s = time.perf_counter()
        try:
            task()
        except Exception as error:
            raise Fault(label, error, self.record.step) from error
        self.spans.append((label, start_s, time.perf_counter()))
        self.board[self.slot] = -label.line
        event.done = True
        return event

    def finish(self, notices: SimpleQueue[Any]) -> None:
        notices.put(self)


class ThreadStream(Stream):
    """One daemon thread with a queue.

    A task that raises puts a `Fault` into `notices`; tasks issued after it, or that wait for it elsewhere, are skipped
    and fail, too. `board[slot]` holds the line of the running op, negative once it is over, for a supervisor. `device`
    is the GPU for which the thread works, since CUDA gives each new thread the first one. `cores`: where the thread,
    and those that compute for it, are kept.
    """

    def __init__(
        self,
        name: str,
        notices: SimpleQueue[Any],
        board: MutableSequence[int],
        slot: int,
        num_threads: int,
        device: torch.device | None = None,
        cores: Sequence[int] = (),
    ):
        super().__init__(name)
        self.cores = cores
        self.notices, self.board, self.slot, self.num_threads = notices, board, slot, num_threads
        self.device = device
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"penstock-{name}", daemon=True)
        self.thread.start()

    def issue(self, task: StreamTask, waits: Iterable[Event], label: Label) -> Event:
        event = HostEvent(self)
        self.queue.put((task, [w for w in waits if w.failed or not w.done], event, label, self.record))
        return event

    def finish(self, notices: SimpleQueue[Any]) -> None:
        self.queue.put((lambda: notices.put(self), None, None, None, None))

    def close(self) -> None:
        self.queue.put((None, None, None, None, None))

    def _run(self) -> None:
        if self.cores:
            use_cores(self.cores)
        torch.get_num_threads()  # a thread's first use would else overwrite the number set next
        torch.set_num_threads(self.num_threads)
        if self.device is not None:
            use_gpu(self.device)
        broken = False
        while True:
            task, waits, event, label, record = self.queue.get()
            if task is None:
                return
            if event is None:
                task()
                continue
            broken |= not self._wait_for(waits, label, record)
            if not broken:
                broken = not self._execute(task, label, record)
            del task  # before the event: whoever it wakes may count on the memory that only this task held
            event.failed = broken
            event.set()
            del event, waits

    def _wait_for(self, waits: Iterable[Event], label: Label, record: StreamRecord) -> bool:
        try:
            for other in waits:
                other.wait()
                if other.failed:
                    return False
        except Exception as error:  # the GPU's own errors are raised by a wait for it
            self.notices.put(Fault(label, error, record.step))
            return False
        return True

    def _execute(self, task: StreamTask, label: Label, record: StreamRecord) -> bool:
        self.board[self.slot] = label.line
        start_s = time.perf_counter()
        try:
            task()
        except BaseException as error:
            self.notices.put(Fault(label, error, record.step))
            return False
        record.spans.append((label, start_s, time.perf_counter()))
        self.board[self.slot] = -label.line
        return True


class CurrentStream:
    """The CUDA stream of a device that the issuing thread's ops go to; None: one of its own."""

    stream: CudaStream | None = None


class CudaStream(Stream):
    """One stream of a GPU. Tasks only launch work, so they run at once on the calling thread.

    An event of a thread (a CPU optimizer's, before the fetch of its weights) blocks the caller; CUDA streams wait for
    each other by events on the device only. `current`: shared by all CUDA streams of the device.
    """

    is_cuda = True

    def __init__(self, name: str, device: torch.device, board: MutableSequence[int], slot: int, current: CurrentStream):
        super().__init__(name)
        self.device, self.board, self.slot, self.current = device, board, slot, current
        self.stream = take_stream(device)
        self.steps = [CudaStep(self.record, timed_event())]  # those under way, the last one last
        self._timed = self.steps[-1].timed
        self.spare: list[CudaEvent] = []  # of steps that are over, to be recorded again
        self.over: list[CudaEvent] = []  # of the last step that is over: tasks of the next one may still wait for them

    @property
    def timed_tasks(self) -> list[tuple[Any, CudaEvent]]:
        """The tasks of the earliest step under way, with their events."""
        return self.steps[0].timed

    def begin(self, step: int = 0) -> None:
        super().begin(step)
        before = self.steps[-1] if self.steps[-1].timed else None
        self.steps = [each for each in self.steps if each.timed]
        self.steps.append(CudaStep(self.record, timed_event(), before=before))
        self._timed = self.steps[-1].timed
        self.steps[-1].origin.record(self.stream)  # now, if the stream is idle
        self.steps[-1].origin_s = time.perf_counter()
        self.stream.wait_stream(current_stream(self.device))  # the caller's batch, or a new arena

    def issue(self, task: StreamTask, waits: Iterable[Event], label: Label) -> Event:
        event = self.spare.pop() if self.spare else CudaEvent(self)
        event.after = self._wait_before(waits, label) if waits else ()
        self.board[self.slot] = label.line
        if self.current.stream is not self:
            set_stream(self.stream)  # whoever runs a program sets the caller's again, once
            self.current.stream = self
        event.issued_s = time.perf_counter()
        try:
            task()
            event.end.record(self.stream)
        except Exception as error:
            raise Fault(label, error, self.record.step) from error
        self._timed.append((label, event))
        return event

    def _wait_before(self, waits: Iterable[Event], label: Label) -> list[CudaEvent]:
        """Wait for these before what is issued next; those of them that are of other CUDA streams."""
        found = []
        for other in waits:
            if isinstance(other, HostEvent):
                other.wait()
                if other.failed:
                    raise Fault(label, RuntimeError("an op that this one needs has failed"), self.record.step)
            elif other.stream is not self:
                self.stream.wait_event(other.end)
                found.append(other)
        return found

    def date_step(self) -> None:
        """Find out when each task of the earliest step under way was over; `follow` has waited for them."""
        self.steps[0].date()

    def finish(self, notices: SimpleQueue[Any]) -> None:
        """As for other streams, but here: the earliest step under way is over, and `date_step` of all streams has been
        called; record its spans. No event marks the start of a task: it starts once it is issued, and all that it waits
        for is over."""
        step, before_s = self.steps[0], 0.0
        for label, event in step.timed:
            start_s = max(before_s, event.issued_s, *[other.end_s for other in event.after])
            before_s = event.end_s
            step.record.spans.append((label, min(start_s, before_s), before_s))
        self.spare += self.over
        self.over, step.timed = [event for _, event in step.timed], []
        self.steps = self.steps[1:] or self.steps
        notices.put(self)

    def close(self) -> None:
        give_stream(self.device, self.stream)


@dataclass(eq=False)
class CudaStep:
    """One step's tasks on a CUDA stream. `origin` was recorded before the first of them, at `origin_s`; if the stream
    was still at work on the step `before`, only the GPU knows how much later that was."""

    record: StreamRecord
    origin: GpuEvent
    origin_s: float = 0.0
    before: CudaStep | None = None
    timed: list[tuple[Any, CudaEvent]] = field(default_factory=list)

    def date(self) -> None:
        """Set `origin_s` and the ends of all tasks, once these are past."""
        if self.before is not None:
            self.origin_s = self.before.origin_s + self.before.origin.elapsed_time(self.origin) / 1e3
            self.before = None
        for _, event in self.timed:
            event.end_s = self.origin_s + self.origin.elapsed_time(event.end) / 1e3


def follow(streams: Iterable[CudaStream], until: Collection[Event] = ()) -> None:
    """Wait for the ops of CUDA streams, of the earliest step under way, in the order of their lines, so that the board
    shows how far the GPU is, not how far ahead its ops have been issued. `until`: wait no longer than for these."""
    rows: list[tuple[int, CudaStream, CudaEvent]] = []
    for stream in streams:
        stream.board[stream.slot] = -abs(stream.board[stream.slot])
        rows += [(label.line, stream, event) for label, event in stream.timed_tasks]
    left = {id(event) for event in until}
    for line, stream, event in sorted(rows, key=lambda row: row[0]):
        if until and not left:
            return
        stream.board[stream.slot] = line
        event.wait()
        stream.board[stream.slot] = -line
        left.discard(id(event))
