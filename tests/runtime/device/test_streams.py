"""Streams: order, events, failure, and memory given back before anybody is told."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runtime.device.streams import CudaStream, CurrentStream, Fault, InlineStream, Stream, ThreadStream, follow


@dataclass
class Label:
    line: int


class Value:
    """Something that a task alone may hold."""


@pytest.fixture
def notices() -> SimpleQueue[Any]:
    return SimpleQueue()


@pytest.fixture
def board() -> list[int]:
    return [0, 0]


@pytest.fixture
def streams(notices: SimpleQueue[Any], board: list[int]):
    made = [ThreadStream(name, notices, board, slot, 1) for slot, name in enumerate(("left", "right"))]
    yield made
    for stream in made:
        stream.close()
        stream.thread.join(5)
        assert not stream.thread.is_alive()


def finish(stream: Stream, notices: SimpleQueue[Any]) -> Any:
    stream.finish(notices)
    return notices.get(timeout=5)


def test_tasks_of_a_stream_run_in_order_on_its_thread(streams, notices, board) -> None:
    left, seen = streams[0], []
    for i in range(20):
        left.issue(lambda i=i: seen.append((i, threading.current_thread().name)), [], Label(i + 2))
    assert finish(left, notices) is left
    assert seen == [(i, "penstock-left") for i in range(20)]
    assert [label.line for label, _, _ in left.spans] == list(range(2, 22))
    assert board[0] == -21  # over


def test_a_task_waits_for_events_of_other_streams(streams, notices) -> None:
    left, right = streams
    gate, seen = threading.Event(), []
    first = left.issue(lambda: (gate.wait(5), seen.append("left")), [], Label(1))
    right.issue(lambda: seen.append("right"), [first], Label(2))
    time.sleep(0.02)
    assert seen == [] and not first.done
    gate.set()
    finish(right, notices)
    assert seen == ["left", "right"]


def test_streams_run_at_the_same_time(streams, notices) -> None:
    meeting = threading.Barrier(2, timeout=5)  # passed only by two at once
    for stream in streams:
        stream.issue(lambda: meeting.wait(), [], Label(1))
    assert {finish(stream, notices) for stream in streams} == set(streams)


def test_many_threads_may_wait_for_one_event(streams) -> None:
    gate = threading.Event()
    event = streams[0].issue(lambda: gate.wait(5), [], Label(1))
    waiting = [threading.Thread(target=event.wait) for _ in range(8)]
    for thread in waiting:
        thread.start()
    gate.set()
    for thread in waiting:
        thread.join(5)
    assert not any(thread.is_alive() for thread in waiting)


def test_what_depends_on_a_failed_task_is_skipped_and_nothing_hangs(streams, notices, board) -> None:
    left, right = streams
    seen: list[str] = []

    def fail() -> None:
        raise ValueError("broken")

    failed = left.issue(fail, [], Label(7))
    after = left.issue(lambda: seen.append("behind"), [], Label(8))
    elsewhere = right.issue(lambda: seen.append("elsewhere"), [failed], Label(9))
    fault = notices.get(timeout=5)
    assert isinstance(fault, Fault) and isinstance(fault.error, ValueError) and fault.label.line == 7
    finish(left, notices), finish(right, notices)
    assert seen == [] and after.failed and elsewhere.failed
    assert board[0] == 7  # where it was when it failed


def test_a_value_that_only_a_task_holds_is_gone_when_its_event_is_set(streams) -> None:
    value = Value()
    alive = weakref.ref(value)
    event = streams[0].issue(lambda value=value: None, [], Label(1))
    del value
    event.wait()
    assert alive() is None


def test_an_inline_stream_runs_at_once_and_raises_here(board) -> None:
    stream, seen = InlineStream("compute", board, 1), []
    assert stream.issue(lambda: seen.append(threading.current_thread()), [], Label(3)).done
    assert seen == [threading.current_thread()] and board == [0, -3]

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(Fault) as caught:
        stream.issue(fail, [], Label(4))
    assert isinstance(caught.value.error, ValueError) and board == [0, 4]


def test_the_board_follows_the_gpu_not_what_has_been_issued() -> None:
    """Two CUDA streams, all of whose ops have been issued: their lines are awaited in the order of the file."""
    board, seen = [7, 9, 4], []

    class End:
        def wait(self) -> None:
            seen.append(list(board))

    def stream(slot: int, *lines: int) -> Any:
        tasks = [(SimpleNamespace(line=line), End()) for line in lines]
        return SimpleNamespace(board=board, slot=slot, timed_tasks=tasks)

    follow([stream(0, 3, 7), stream(1, 5, 9)])
    assert seen == [[3, -9, 4], [-3, 5, 4], [7, -5, 4], [-7, 9, 4]] and board == [-7, -9, 4]


@pytest.mark.gpu
def test_cuda_streams_wait_on_the_device_only(notices, board) -> None:
    device = torch.device("cuda")
    copy, compute = (
        CudaStream(name, device, board, slot, CurrentStream()) for slot, name in enumerate(("h2d", "compute"))
    )
    host = torch.randn(1 << 20).pin_memory()
    place = torch.zeros(1 << 20, device=device)
    place.sum()  # its kernel is loaded at the first call, which may wait for all streams
    torch.cuda.synchronize()
    for stream in (copy, compute):
        stream.begin()
    found: list[torch.Tensor] = []
    with torch.cuda.stream(copy.stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s, in which a slow host issues what follows
    with torch.cuda.stream(torch.cuda.current_stream()):  # each op sets its own
        arrived = copy.issue(lambda: place.copy_(host, non_blocking=True), [], Label(2))
        total = compute.issue(lambda: found.append(place.sum()), [arrived], Label(3))
    assert not total.done  # issuing did not wait for the sleeping copy stream
    origins = copy.steps[-1], compute.steps[-1]
    follow((copy, compute))
    for stream in (copy, compute):
        stream.date_step()
    for stream in (copy, compute):
        assert finish(stream, notices) is stream
    assert float(found[0]) == pytest.approx(float(host.sum()), rel=1e-4)
    (_, _, copied_s), (_, summed_s, _) = copy.spans[0], compute.spans[0]
    assert arrived.end.elapsed_time(total.end) >= 0.0
    # Each stream counts from an event of its own, which emulated delays, and a busy machine, put off.
    first, second = origins
    put_off_s = first.origin.elapsed_time(second.origin) / 1e3 - (second.origin_s - first.origin_s)
    assert copied_s <= summed_s + 1e-4 + abs(put_off_s)
