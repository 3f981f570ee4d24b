"""Timing transfers as workers run them: copies and messages of CPU devices on threads of their own, messages of GPUs on
CUDA streams, messages through the runtime's own link.

A transfer's latency is the time from its issue until a thread that waits for it goes on, for a tensor too small to take
any time itself: the copy or the message, and the waking of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device.peers import LOOPBACK, PeerLink
from ..device.streams import Event, StreamTask, ThreadStream

CPU = torch.device("cpu")
THERE, BACK = "there", "back"
BURSTS = 8
LEAST_S = 1e-9  # of a message whose time is that of an empty one
LABEL = SimpleNamespace(line=1)


class StreamThread:
    """A stream's thread; `wait` raises the faults of its tasks."""

    def __init__(self, name: str):
        self.notices: SimpleQueue[object] = SimpleQueue()
        self.stream = ThreadStream(name, self.notices, [0], 0, torch.get_num_threads())

    def issue(self, task: StreamTask, *after: Event) -> Event:
        return self.stream.issue(task, after, LABEL)

    def wait(self, event: Event) -> None:
        """Raises the `Fault` of a task that failed."""
        event.wait()
        if event.failed:
            fault = self.notices.get()
            assert isinstance(fault, Exception)
            raise fault


class StreamOfGpu:
    """A CUDA stream with the methods of a `StreamThread`: a task is enqueued at once, and waits for others there."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def issue(self, task: StreamTask, *after: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            task()
            done: torch.cuda.Event = self.stream.record_event()
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


@contextmanager
def two_lanes(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """One for sends and one for receives: CUDA streams of a GPU, else threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what is sent was made on another stream
        yield StreamOfGpu(device), StreamOfGpu(device)
        torch.cuda.synchronize(device)
        return
    sends, receives = StreamThread("send"), StreamThread("recv")
    try:
        yield sends, receives
    finally:
        sends.stream.close()
        receives.stream.close()


def undisturbed_s(work: Callable[[], object], repeats: int) -> float:
    """The first quartile of the least disturbed of several bursts of `repeats` runs: if all cores are busy with other
    work, waking a thread may take a hundred times as long for a while."""
    work()
    quartiles = []
    for _ in range(BURSTS):
        times = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - start_s)
        quartiles.append(sorted(times)[repeats // 4])
    return min(quartiles)


def fetch_latency_s(repeats: int = 100) -> float:
    """Seconds of a fetch with nothing in it, on a CPU device."""
    lane, source, target = StreamThread("fetch"), torch.ones(64), torch.empty(64)

    def copy() -> None:
        target.copy_(source)

    try:
        return undisturbed_s(lambda: lane.wait(lane.issue(copy)), repeats)
    finally:
        lane.stream.close()


def message_rates(
    store: dist.Store, rank: int, sizes: Sequence[int], hostname: str | None = LOOPBACK, device: torch.device = CPU
) -> dict[str, Any]:
    """Latency and bandwidth of messages between ranks 0 and 1, and the share of the bandwidth that messages of each of
    `sizes` (in bytes, rising) reach; both must call this. See `message_seconds`."""
    latency_s, took_s = message_seconds(store, rank, sizes, hostname, device)
    return {"link_latency_s": latency_s, **link_shares(latency_s, took_s)}


def message_seconds(
    store: dist.Store, rank: int, sizes: Sequence[int], hostname: str | None = LOOPBACK, device: torch.device = CPU
) -> tuple[float, dict[int, float]]:
    """Seconds of an empty message between ranks 0 and 1, one direction at a time, and of one of each of `sizes`, by its
    bytes; both must call this, and rank 0 has the seconds. `hostname`: see `PeerLink`. The messages are in the memory
    of `device`, by gloo in a host's and by NCCL in a GPU's."""
    link = PeerLink(store, rank, 2, {}, device, hostname=hostname, timeout_s=60.0)
    link.connect({(0, 1): [THERE], (1, 0): [BACK]}, {})
    values = [torch.ones(1, device=device)]
    values += [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
    with two_lanes(device) as (sends, receives):
        latency_s = _one_way_s(link, sends, receives, values[0], 50)
        took_s = [_one_way_s(link, sends, receives, value, 4) for value in values[1:]]
    return latency_s, dict(zip(sizes, took_s, strict=True))


def link_shares(latency_s: float, took_s: Mapping[int, float]) -> dict[str, Any]:
    """The bandwidth of a link, which is what the largest message reaches, and the share of it that each size reaches;
    no shares if all sizes reach all of it.

    `took_s`: seconds of messages by their bytes, `latency_s` of them those of an empty one. A larger message counts as
    slower than a smaller one, by 1% at least, so that rounding makes no curve of which a document says otherwise.
    """
    sizes = sorted(took_s)
    own_s = (max(took_s[size] - latency_s, LEAST_S) for size in sizes)
    moving_s = list(accumulate(own_s, lambda before_s, now_s: max(1.01 * before_s, now_s)))
    rates = [size / seconds for size, seconds in zip(sizes, moving_s)]
    shares = {size: min(1.0, float(f"{rate / rates[-1]:.3g}")) for size, rate in zip(sizes, rates)}
    return {"link": rates[-1], "link_shares": shares if min(shares.values()) < 1 else None}


def _one_way_s(link: PeerLink, sends: Any, receives: Any, value: Tensor, repeats: int) -> float:
    """Half of the time between a send and the arrival of the other side's answer, at rank 0. A GPU answers by itself, a
    CPU device's thread is woken."""
    other = 1 - link.index

    def send() -> None:
        link.send(value, other, BACK if link.index else THERE)

    def receive() -> None:
        link.recv(torch.empty_like(value), other, THERE if link.index else BACK)

    def there_and_back() -> None:
        if link.index == 0:
            sends.issue(send)
            receives.wait(receives.issue(receive))
        else:
            arrived = receives.issue(receive)
            if not value.is_cuda:
                receives.wait(arrived)
            sends.wait(sends.issue(send, *([arrived] if value.is_cuda else [])))

    return undisturbed_s(there_and_back, repeats) / 2
