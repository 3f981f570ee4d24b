"""Capturing a stream into a CUDA graph, as torch does it: what a launch computes, and what a capture forbids.

Emulated devices have to show the same as real ones here, as whatever captures stages counts on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def warm_up(run: Callable[[], object]) -> None:
    """As torch wants it before a capture: the first calls, on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def loss_of(x: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ weights).pow(2).mean()


@pytest.mark.emulated_core
def test_launches_compute_from_what_their_inputs_then_are() -> None:
    x, weights = numbers(32, 64).cuda(), numbers(64, 64, seed=1).cuda().requires_grad_()
    warm_up(lambda: loss_of(x, weights).backward())
    weights.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(x, weights)
        loss.backward()
    assert weights.grad is not None
    found, wanted = [], []
    for seed in range(4):
        x.copy_(numbers(32, 64, seed=seed))
        with torch.no_grad():
            weights.mul_(0.9)
        graph.replay()
        found.append((loss.clone(), weights.grad.clone()))
        again = weights.detach().clone().requires_grad_()
        value = loss_of(x, again)
        value.backward()
        assert again.grad is not None
        wanted.append((value.detach(), again.grad))
    for ours, eager in zip(found, wanted):
        assert torch.equal(ours[0], eager[0]) and torch.equal(ours[1], eager[1])


def test_nothing_is_computed_while_a_stream_captures() -> None:
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    assert x.sum().item() == 0
    graph.replay()
    graph.replay()
    assert x.tolist() == [2.0] * 8


def test_each_launch_draws_other_numbers_and_the_generator_goes_on() -> None:
    x, generator = torch.ones(4096, device="cuda"), torch.cuda.default_generators[0]
    warm_up(lambda: torch.nn.functional.dropout(x, 0.5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped = torch.nn.functional.dropout(x, 0.5)
    torch.cuda.manual_seed(7)
    start = generator.get_offset()
    graph.replay()
    one_step = generator.get_offset() - start
    first = dropped.clone()
    graph.replay()
    second = dropped.clone()
    assert one_step > 0 and generator.get_offset() == start + 2 * one_step
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.nn.functional.dropout(x, 0.5), first)
    assert torch.equal(torch.nn.functional.dropout(x, 0.5), second)


def test_streams_that_join_run_beside_each_other_and_wait_where_events_say_so() -> None:
    x, side = torch.zeros(1024, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = doubled + 1
        on_own = doubled - 1
        torch.cuda.current_stream().wait_stream(side)
        total = on_side * on_own
    for value in (1.0, 3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert total.unique().tolist() == [4 * value * value - 1]


def test_a_launch_on_another_stream_comes_after_the_one_before() -> None:
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [12.0] * 8


def synchronises(x: Tensor) -> None:
    torch.cuda.synchronize()


def reads(x: Tensor) -> None:
    x.sum().item()


def picks(x: Tensor) -> None:
    x[x > 0]


def copies_from_pageable_memory(x: Tensor) -> None:
    x.copy_(torch.ones(8), non_blocking=True)


def asks_for_an_event(x: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.query()


def waits_for_work_outside(x: Tensor) -> None:
    outside = torch.cuda.Stream()
    event = outside.record_event()
    torch.cuda.current_stream().wait_event(event)


def leaves_a_stream_behind(x: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


def allocates_from_the_driver(x: Tensor) -> None:
    place = ctypes.c_void_p()
    error = ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(place), ctypes.c_size_t(1 << 20))
    assert error == 900 and not place.value


MISUSE = [
    synchronises,
    reads,
    picks,
    copies_from_pageable_memory,
    asks_for_an_event,
    waits_for_work_outside,
    leaves_a_stream_behind,
    allocates_from_the_driver,
]


@pytest.mark.parametrize("misuse", MISUSE)
def test_what_a_capture_forbids_ends_it_and_nothing_else(misuse: Callable[[Tensor], None]) -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
        x.add_(1)
        misuse(x)
    assert not torch.cuda.is_current_stream_capturing()
    assert (x * 3).tolist() == [3.0] * 8
    after = torch.cuda.CUDAGraph()
    with torch.cuda.graph(after):
        x.add_(1)
    after.replay()
    assert x.tolist() == [2.0] * 8


def test_memory_of_a_graph_stays_its_own() -> None:
    """What was freed within a capture goes to nobody else: a launch writes there again."""
    x = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ((x + 1) * 2).sum()
    others = [torch.full((1 << 20,), 5.0, device="cuda") for _ in range(4)]
    for _ in range(3):
        graph.replay()
        assert result.item() == 4.0 * (1 << 20)
    assert all(bool((other == 5).all()) for other in others)
