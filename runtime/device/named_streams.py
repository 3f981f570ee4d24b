"""The streams of one device by name: which kind each one is, how the first fault of any is found, and where each is.

On a CPU device a stream is a thread; a program that uses no stream beside compute runs on the calling thread instead,
as there is nothing to overlap. On a CUDA device a stream is a CUDA stream, unless its ops work on host memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ...ir import ops
from ..accelerator import GpuStream, current_stream, give_stream, on_stream, take_stream
from .host import available_cores, near_cores, node_of, optimizer_cores
from .peers import PeerLink
from .prepare import Issues
from .setup import DeviceSetup
from .streams import (
    CudaEvent,
    CudaStream,
    CurrentStream,
    Event,
    Fault,
    HostEvent,
    InlineStream,
    Stream,
    ThreadStream,
    follow,
)

HOST_STREAMS = (ops.CPU, ops.READ, ops.WRITE, f"{ops.COMM} host")  # threads on every kind of device
STREAM_SLOTS = (*ops.STREAMS, f"{ops.COMM} host")  # the board has one place for each


class Streams:
    """Makes each stream at its first use. The streams write the line of their current op on `board`. `copies`: the CUDA
    stream of the thread that copies to the device, None if no thread does."""

    def __init__(
        self,
        setup: DeviceSetup,
        device: torch.device,
        link: PeerLink | None = None,
        board: MutableSequence[int] | None = None,
    ):
        self.spec, self.device, self.link = setup.spec, device, link
        self.beside = [i for i, other in enumerate(setup.hardware.devices) if other.host == self.spec.host]
        self.place = self.beside.index(setup.index)
        threads = setup.hardware.hosts[self.spec.host].optimizer_threads  # of all GPUs of the host together
        self.optimizer_threads = None if threads is None else -(-threads // len(self.beside))
        self.num_threads = torch.get_num_threads() if setup.share.num_threads is None else setup.share.num_threads
        self.board = [0] * len(STREAM_SLOTS) if board is None else board
        self.copies: GpuStream | None = None
        self.made: dict[str, Stream] = {}
        self._current = CurrentStream()
        self._notices: SimpleQueue[Any] = SimpleQueue()
        self.is_quiet = self._notices.empty  # nothing is there that `raise_fault` would look at
        self._over: Counter[Any] = Counter()  # notices that came before anyone waited for them

    def name_of(self, work: ops.Work) -> str:
        """The stream that an op really runs on here."""
        if self.spec.kind == "cuda" and work.group:
            on_device = work.source == ops.DEVICE and (self.link is None or self.link.on_device(work.group))
            return ops.COMM if on_device else f"{ops.COMM} host"
        return work.stream

    def copy_by_thread(self) -> None:
        """Let a thread issue the copies to a GPU. Called if copies wait for turns or disks, which would else hold up
        computation."""
        if self.spec.kind == "cuda" and self.device.type != "meta":
            self.copies = take_stream(self.device)

    def streams_of(self, plan: Issues) -> dict[str, Stream]:
        """The streams that a program uses."""
        alone = self.spec.kind == "cpu" and plan.streams <= {ops.HOST, ops.COMPUTE}
        found = {}
        for name in plan.streams:
            inline = self.spec.kind == "cpu" and (name == ops.HOST or alone)
            found[name] = self._stream(f"{name}/inline" if inline else name)
        return found

    def _stream(self, name: str) -> Stream:
        if name not in self.made:
            key, _, inline = name.partition("/")
            slot = STREAM_SLOTS.index(key)
            if inline:
                self.made[name] = InlineStream(key, self.board, slot)
            elif self.spec.kind == "cuda" and key not in HOST_STREAMS and not (key == ops.H2D and self.copies):
                self.made[name] = CudaStream(key, self.device, self.board, slot, self._current)
            else:
                self.made[name] = self._thread(key, slot)
        return self.made[name]

    def _thread(self, key: str, slot: int) -> Stream:
        num_threads = self.num_threads if key in (ops.COMPUTE, ops.CPU) else 1
        gpu = self.device if self.spec.kind == "cuda" else None
        cores: list[int] = []
        node = None if gpu is None else node_of(gpu)
        if gpu is not None and key == ops.CPU:
            near = near_cores(node, self.place, len(self.beside)) if node is not None else None
            cores = optimizer_cores(*near or (available_cores(), self.place, len(self.beside)), self.optimizer_threads)
            return ThreadStream(key, self._notices, self.board, slot, len(cores), gpu, cores)
        if node is not None:  # disks and messages, which the kernel may move to any core of the node
            cores = near_cores(node, self.place, len(self.beside))[0]
        return ThreadStream(key, self._notices, self.board, slot, num_threads, gpu, cores)

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """While it lasts, the calling thread issues for all streams, backwards too: autograd's own thread would only
        take turns with it. Afterwards its CUDA stream is as it is now."""
        self._current.stream = None
        own = on_stream(current_stream(self.device)) if self.device.type == "cuda" else nullcontext()
        with own, torch.autograd.set_multithreading_enabled(False):
            yield

    def end_issue(self, used: Collection[Stream]) -> None:
        """All ops of a step have been issued to these streams."""
        for stream in used:
            if not stream.is_cuda:
                stream.finish(self._notices)

    def wait_end(self, used: Collection[Stream]) -> None:
        """Wait until these streams are done with the earliest step that is under way and was issued to its end. Raises
        the `Fault` of one that has failed."""
        on_gpu = [stream for stream in used if isinstance(stream, CudaStream)]
        follow(on_gpu)
        for stream in on_gpu:
            stream.date_step()
        for stream in on_gpu:
            stream.finish(self._notices)
        self._wait_for(used)

    def wait(self, used: Collection[Stream], events: Collection[Event]) -> None:
        """Wait for tasks of the only step that is under way on these streams. Raises the `Fault` of one that failed."""
        on_threads = {event for event in events if isinstance(event, HostEvent) and not event.done}
        on_gpu = [event for event in events if isinstance(event, CudaEvent)]
        if on_gpu:
            follow([stream for stream in used if isinstance(stream, CudaStream)], on_gpu)
        for event in on_threads:
            event.tell(self._notices)
        self._wait_for(on_threads)
        self.raise_fault()

    def _wait_for(self, wanted: Collection[Any]) -> None:
        """Wait for one notice of each."""
        left = set(wanted)
        while left:
            found = {notice for notice in left if self._over[notice]}
            self._over.subtract(found)
            left -= found
            if left:
                self._take(self._notices.get())
        self._over += Counter()  # forgets those at zero

    def _take(self, notice: Any) -> None:
        if isinstance(notice, Fault):
            raise notice
        self._over[notice] += 1

    def interrupt(self, error: Exception) -> None:
        """End the running function with this error, whatever its streams wait for. Called from another thread."""
        self._notices.put(Fault(None, error))

    def raise_fault(self) -> None:
        """Raise the `Fault` of a stream, if there is one."""
        while not self._notices.empty():
            self._take(self._notices.get())

    def first_fault(self, fault: Fault) -> Fault:
        """The earliest of `fault` and the faults of other streams: the later ones follow from it."""
        while not self._notices.empty():
            notice = self._notices.get()
            if isinstance(notice, Fault) and notice.time_s < fault.time_s:
                fault = notice
        return fault

    def close(self) -> None:
        for stream in self.made.values():
            stream.close()
        self.made.clear()
        if self.copies is not None:
            give_stream(self.device, self.copies)
            self.copies = None


def describe_position(file: Path, board: Sequence[int]) -> tuple[str, str]:
    """Two texts: the lines of the running streams for people, and the code of the first one. Running streams come
    first, the compute stream before others. For `board` see `Streams`."""
    numbers = {name: board[i] for i, name in enumerate(STREAM_SLOTS) if board[i]}
    if not numbers:
        return "before its first op", ""
    order = sorted(numbers, key=lambda name: (numbers[name] < 0, name != ops.COMPUTE))
    lines = file.read_text().splitlines()
    texts = [_describe_line(lines, abs(numbers[name]), name, numbers[name] < 0) for name in order]
    running = [t for t, name in zip(texts, order) if numbers[name] > 0] or texts[:1]
    return "; ".join(running), _code(lines, abs(numbers[order[0]]))


def _code(lines: list[str], number: int) -> str:
    return lines[number - 1].split("  #")[0].strip() if number <= len(lines) else ""


def _describe_line(lines: list[str], number: int, stream: str, over: bool) -> str:
    code = _code(lines, number)
    micro_batch = re.search(r"micro_batch=(\d+)", code)
    where = f"micro-batch {micro_batch.group(1)}, " if micro_batch else ""
    return f"{'after ' if over else ''}line {number}: `{code}` ({where}{stream})"
