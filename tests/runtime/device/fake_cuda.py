"""CUDA's streams and events without a GPU, as far as their order goes, and a detector of races between them.

Work on a fake stream runs at once, on CPU memory, so results are right whatever the order. What is checked is whether
the order was promised: streams, events and host threads carry vector clocks, every memory access of a task is noted,
and two accesses to the same bytes, one of them a write, must be ordered by events. Freed memory is kept, so that an
address always means the same value. It is checked instead that memory that crosses streams is lent to them until the
stream that took it comes after them: CUDA's allocator would else hand it out again too early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.runtime.device import streams
from penstock.runtime.device.issuing import Loans
from penstock.runtime.device.named_streams import Streams
from penstock.runtime.device.runtime import DeviceRuntime
from penstock.runtime.device.session import DeviceSession
from penstock.runtime.ssd.file import SsdFile

Clock = dict[str, int]  # per stream or host thread, how much of its work is known to be over


def merge(into: Clock, other: Clock) -> None:
    for name, time in other.items():
        into[name] = max(time, into.get(name, 0))


class FakeStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name, self.clock = cuda, name, Clock()

    def wait_event(self, event: FakeEvent) -> None:
        merge(self.clock, event.clock)

    def query(self) -> bool:
        return False  # so that no later job gets this stream

    def wait_stream(self, other: FakeStream) -> None:
        merge(self.clock, other.clock)

    def synchronize(self) -> None:
        merge(self.cuda.host_clock(), self.clock)


class FakeEvent:
    """Stands for `torch.cuda.Event`: the work before its last `record`."""

    def __init__(self, cuda: FakeCuda):
        self.cuda, self.clock = cuda, Clock()

    def record(self, stream: FakeStream) -> None:
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return False  # as if the GPU were slow, so that nobody skips a wait

    def synchronize(self) -> None:
        self.cuda.host_waits += threading.current_thread() is threading.main_thread()
        merge(self.cuda.host_clock(), self.clock)

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


@dataclass
class Access:
    """Bytes of one storage that a task touched, and the work that it knew to be over then."""

    start: int
    end: int
    is_write: bool
    actor: str
    clock: Clock
    what: str


class FakeCuda:
    """All clocks, and every access so far. A test asserts that `races` and `not_held` are empty."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}  # of host threads
        self.current = threading.local()
        self.default = FakeStream(self, "default")
        self.accesses: dict[int, list[Access]] = {}  # per storage
        self.births: dict[int, str] = {}  # storage to the CUDA stream whose task made it
        self.held: set[tuple[int, str]] = set()
        self.alive: list[Any] = []
        self.races: list[str] = []
        self.not_held: set[str] = set()
        self.num_streams = 0
        self.host_waits = 0  # the number of times that the issuing thread waited for GPU events
        self.lock = threading.Lock()

    def host_clock(self) -> Clock:
        return self.clocks.setdefault(threading.current_thread().name, {})

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self.current, "stream", self.default)

    def set_stream(self, stream: FakeStream) -> None:
        self.current.stream = stream

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.current.stream = before

    def actor(self) -> tuple[str, Clock]:
        stream = self.current_stream()
        if stream is self.default:
            return threading.current_thread().name, self.host_clock()
        merge(stream.clock, self.host_clock())  # a launch comes after all that its thread has seen
        return stream.name, stream.clock

    def touch(self, tensor: Tensor, is_write: bool, what: str, is_new: bool = False) -> None:
        """Note an access, and whether it races with an earlier one. `is_new`: the task has just taken this memory."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        key, start = storage.data_ptr(), tensor.data_ptr()
        end = start + tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())))
        with self.lock:
            self.alive.append(storage)
            actor, clock = self.actor()
            clock[actor] = clock.get(actor, 0) + 1
            on_stream = self.current_stream() is not self.default
            if is_new and on_stream:
                self.births[key] = actor
            home = self.births.get(key, actor)
            if home != actor and on_stream and (key, actor) not in self.held:
                self.not_held.add(f"{what} uses memory of {home} on {actor}")
            mine = Access(start, end, is_write, actor, dict(clock), what)
            for other in self.accesses.setdefault(key, []):
                apart = other.end <= start or end <= other.start
                known = clock.get(other.actor, 0) >= other.clock[other.actor]
                if (is_write or other.is_write) and not apart and not known:
                    self.races.append(f"{what} on {actor} does not wait for {other.what} on {other.actor}")
            self.accesses[key].append(mine)


class _Watch(TorchDispatchMode):
    """Notes what every torch call reads and writes. Views touch nothing."""

    def __init__(self, cuda: FakeCuda, label: str):
        super().__init__()
        self.cuda, self.label = cuda, label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = f"{func} of {self.label}"
        if not func.is_view and func is not torch.ops.aten.detach.default:
            for argument, value in zip(func._schema.arguments, args):
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self.cuda.touch(tensor, written, what)
        result = func(*args, **kwargs)
        if not func.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.cuda.accesses:
                    self.cuda.touch(tensor, True, what, is_new=True)
        return result


class FakeCudaSession(DeviceSession):
    """A session for a CUDA device in the hardware document whose tensors lie on the CPU."""

    def _find_device(self) -> torch.device:
        return torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put fakes in the place of torch.cuda's streams and events, and watch every task of a `DeviceRuntime`."""
    cuda = FakeCuda()

    class Stream(FakeStream):
        def __init__(self, device: Any = None):
            cuda.num_streams += 1
            super().__init__(cuda, f"stream {cuda.num_streams}")

    class Event(FakeEvent):
        def __init__(self, **options: bool):
            super().__init__(cuda)

    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": cuda.use_stream,
        "current_stream": cuda.current_stream,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.accelerator, "set_stream", cuda.set_stream)
    _watch_tasks(monkeypatch, cuda)
    _watch_files(monkeypatch, cuda)
    _carry_clocks(monkeypatch, cuda)

    _watch_loans(monkeypatch, cuda)
    return cuda


def _watch_loans(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Note what is lent to whom, and who lets go of it before the stream that took it is past all its readers."""
    lend, settle = Loans._lend, Loans.settle

    def lend_loans(loans: Loans, taker: Any, tensors: list[Tensor], reader: Any, index: int) -> None:
        actor = reader.stream.name if reader.is_cuda else f"penstock-{reader.name}"
        cuda.held.update((tensor.untyped_storage().data_ptr(), actor) for tensor in tensors)
        lend(loans, taker, tensors, reader, index)

    def settle_loans(loans: Loans, stream: Any, waits: Any) -> None:
        before = borrowed_keys(loans, stream)
        settle(loans, stream, waits)
        _, clock = cuda.actor()
        for reader, key in before - borrowed_keys(loans, stream):
            for access in cuda.accesses.get(key, ()):
                if access.actor == reader and clock.get(reader, 0) < access.clock[reader]:
                    cuda.races.append(f"{stream.name} takes its memory back from {access.what} on {reader}")

    def borrowed_keys(loans: Loans, taker: Any) -> set[tuple[str, int]]:
        rows = loans._open.get(taker, {}).items()
        return {
            (reader.stream.name, tensor.untyped_storage().data_ptr())  # type: ignore[attr-defined]
            for reader, held in rows
            if reader.is_cuda
            for _, tensors in held
            for tensor in tensors
        }

    monkeypatch.setattr(Loans, "_lend", lend_loans)
    monkeypatch.setattr(Loans, "settle", settle_loans)


def _watch_tasks(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    launch = DeviceRuntime._launch

    def watch_over(
        runtime: DeviceRuntime, issue: Any, reads: Any, work: Callable[..., Any], *memory: Any, **more: Any
    ) -> Any:
        def watch_work(run: Any, *values: Any) -> Any:
            with _Watch(cuda, issue.where):
                return work(run, *values)

        return launch(runtime, issue, reads, watch_work, *memory, **more)

    monkeypatch.setattr(DeviceRuntime, "_launch", watch_over)


def _watch_files(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Disks read and write memory without any torch call."""
    read, write = SsdFile.read, SsdFile.write

    def watched_read(file: SsdFile, offset_bytes: int, into: Tensor) -> None:
        cuda.touch(into, True, f"read of {file.name}")
        read(file, offset_bytes, into)

    def watched_write(file: SsdFile, offset_bytes: int, source: Tensor) -> None:
        cuda.touch(source, False, f"write of {file.name}")
        write(file, offset_bytes, source)

    monkeypatch.setattr(SsdFile, "read", watched_read)
    monkeypatch.setattr(SsdFile, "write", watched_write)


def _carry_clocks(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Events and queues between host threads order them, too."""
    wait, set_event = streams.HostEvent.wait, streams.HostEvent.set
    clocks: dict[int, Clock] = {}
    keep: list[streams.HostEvent] = []

    def set_with_clock(event: streams.HostEvent) -> None:
        keep.append(event)
        clocks[id(event)] = dict(cuda.host_clock())
        set_event(event)

    def wait_with_clock(event: streams.HostEvent) -> None:
        wait(event)
        merge(cuda.host_clock(), clocks.get(id(event), {}))

    monkeypatch.setattr(streams.HostEvent, "set", set_with_clock)
    monkeypatch.setattr(streams.HostEvent, "wait", wait_with_clock)
    issue = streams.ThreadStream.issue

    def issue_with_clock(stream: streams.ThreadStream, task: Any, waits: Any, label: Any) -> Any:
        known, waits = dict(cuda.host_clock()), list(waits)
        for event in waits:
            if isinstance(event, streams.HostEvent) and event.done:  # nobody will wait for it again
                merge(known, clocks.get(id(event), {}))

        def after() -> None:
            merge(cuda.host_clock(), known)
            task()

        return issue(stream, after, waits, label)

    monkeypatch.setattr(streams.ThreadStream, "issue", issue_with_clock)
    wait_end = Streams.wait_end

    def wait_end_with_clocks(made: Streams, used: Any) -> None:
        wait_end(made, used)  # it has waited for every thread
        for clock in list(cuda.clocks.values()):
            merge(cuda.host_clock(), clock)

    monkeypatch.setattr(Streams, "wait_end", wait_end_with_clocks)
