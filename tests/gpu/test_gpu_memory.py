"""A GPU's memory: as accounted, page-locked where it is copied from, never over the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers.gpt import MEDIUM
from penstock.bench.peers.gpu_sections import MOST_LIBRARY_MIB, allocator_peak
from penstock.ir.errors import BudgetExceeded
from penstock.runtime.stage.arena import allocate
from penstock.tests.gpu.rehearsal import (
    SETUP,
    SIZE,
    WIDE,
    batches,
    compile_job,
    exact,
    model_of,
    on_gpu,
    only_on_gpu,
    session_of,
    swapping_job,
)

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
LIBRARY_BYTES = MOST_LIBRARY_MIB << 20  # workspaces of cuBLAS, which torch's allocator counts


def tight_job(model: nn.Module, batch: Mapping[str, Tensor], **options: Any) -> penstock.Job:
    """Compile a job that swaps, for a GPU with 1 % more memory than its plan takes: within more than that, memory of
    gradients that leave is lent until a stream has to wait for its room (`ir/program/order.py`)."""
    with swapping_job(model, batch, **options) as roomy:
        (device,) = roomy.hardware.devices
        share = roomy.plan.predicted.peak_bytes[device.name] / device.budget_bytes
    return compile_job(model, batch, stages=0, memory=int(1.01 * share * device.memory_bytes), **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["resident", "swapped"])
def test_the_allocator_takes_what_was_accounted_and_that_is_what_was_predicted(kind: str, precision: str) -> None:
    size = SIZE if SETUP.device == "cpu" else WIDE
    model, data = model_of(size), batches(size, rows=4, count=1)
    before = torch.cuda.memory_allocated() if SETUP.on_gpu else 0
    make = tight_job if kind == "swapped" else compile_job
    with make(model, data[0], precision=precision) as job:
        job.step(data[0])
        job.step(data[0])  # from here on accounted as measured
        taken_bytes, library_bytes = allocator_peak(SETUP, job, data[0], before)
        name = job.hardware.devices[0].name
        accounted, predicted = job.last.peak_bytes[name], job.plan.predicted.peak_bytes[name]
        assert predicted == pytest.approx(accounted, rel=0.05)
        if SETUP.on_gpu:
            assert 0.6 * accounted <= taken_bytes <= 1.05 * accounted
            assert library_bytes <= MOST_LIBRARY_MIB << 20


def test_host_buffers_are_page_locked_where_a_gpu_copies() -> None:
    model, data = model_of(), batches(count=1)
    with swapping_job(model, data[0], precision="bf16") as job:
        job.step(data[0])
        arena = session_of(job).state.memory.dram_arena.flat  # of gradients on their way
        assert arena.numel() > 0 and arena.is_pinned() == SETUP.on_gpu
        for store in session_of(job).state.stores.values():
            assert store.flat.device.type == "cpu" and store.flat.is_pinned() == SETUP.on_gpu
            assert not next(iter(store.masters.values())).is_pinned()


@only_on_gpu
def test_page_locked_memory_is_exact_and_copies_run_asynchronously() -> None:
    num_bytes = (33 << 20) + 12345
    flat = allocate(num_bytes, torch.device("cuda"), pinned=True)
    assert flat.numel() == num_bytes and flat.is_pinned() and flat[4096:8192].is_pinned()
    flat.fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s in which the copy below has to wait
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    there.copy_(flat, non_blocking=True)
    assert not torch.cuda.current_stream().query()  # it was only issued
    back = allocate(num_bytes, torch.device("cuda"), pinned=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert int(back.sum()) == 7 * num_bytes


def test_more_than_the_budget_raises_before_anything_is_allocated() -> None:
    model, data = model_of(), batches(count=1)
    with compile_job(model, data[0]) as job:
        job.step(data[0])
        account = session_of(job).state.memory.accounts["device"]
        account.budget_bytes = account.live_bytes + 1000
        before = torch.cuda.memory_allocated() if SETUP.on_gpu else 0
        with pytest.raises(BudgetExceeded, match=r"device 0 .*line \d+: .*missing"):
            job.step(data[0])
        if SETUP.on_gpu:
            assert torch.cuda.memory_allocated() <= before + LIBRARY_BYTES


@only_on_gpu
def test_what_torch_itself_cannot_allocate_names_the_op() -> None:
    model, data = model_of(MEDIUM), batches(MEDIUM, count=1)
    with compile_job(model, data[0]) as job:
        job.step(data[0])
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.0)
        try:
            with pytest.raises(BudgetExceeded, match=r"device 0 .*line \d+: .*the GPU has no room left"):
                job.step(data[0])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@only_on_gpu
def test_the_allocator_is_held_to_the_memory_described_and_let_go_again() -> None:
    total_bytes = torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(1.0)
    model, data = model_of(), batches(count=1)
    hardware = penstock.Hardware.detect().with_(num_devices=1, memory="4GB", dram="16GB")
    with penstock.compile(model, hardware, example_inputs=data[0], micro_batches=2) as job:
        job.step(data[0])
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(4e9 / total_bytes, rel=0.01)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(1.0)


@only_on_gpu
def test_nothing_stays_behind_a_closed_job() -> None:
    model, data = model_of(), batches(count=1)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        job = swapping_job(model, data[0])
        job.step(data[0])
        job.close()
        del job
        SETUP.tidy()
    assert torch.cuda.memory_allocated() <= before + LIBRARY_BYTES
