"""The first call's parts: what one GPU, its links and its host do, measured in small pieces without any plan."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.bench import host_cost, optimizer
from penstock.bench.peers.gpt import batch_of, gpt
from penstock.bench.peers.gpu_sections import compile_job, swapping_job
from penstock.bench.peers.gpu_setup import Row, Setup, note_call
from penstock.runtime.accelerator import lock_pages
from penstock.runtime.measure import cuda
from penstock.runtime.nodes import map_pages
from penstock.runtime.stage.arena import locked_memory

MIB = 2**20
GB = 1e9
PIECE_BYTES = 64 * MIB


def context(setup: Setup) -> Iterator[Row]:
    """The memory of the card beside tensors, as each library comes: the context, products, convolution."""

    def hold_back() -> dict[str, float]:
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "on the card beside torch's blocks": (total_bytes - free_bytes - reserved) / MIB,
            "reserved by torch": reserved / MIB, "allocated": torch.cuda.memory_allocated() / MIB,
        }  # fmt: skip

    if not setup.on_gpu:
        yield note_call("memory of a context", "a CPU device has none")
        return
    yield note_call("MiB held by the context and other programs", hold_back())
    ones = torch.ones(1024, 1024, device="cuda")
    yield note_call("MiB held after the first kernel", hold_back())
    ones @ ones
    yield note_call("MiB held after a product in fp32", hold_back())
    half = ones.bfloat16()
    half @ half
    yield note_call("MiB held after a product in bf16", hold_back())
    torch.nn.functional.conv2d(torch.ones(1, 8, 64, 64, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda"))
    yield note_call("MiB held after a convolution", hold_back())
    (reserves,) = cuda.measured_reserves(1)
    yield note_call("bytes that a plan is told to leave", reserves)


def pinning(setup: Setup) -> Iterator[Row]:
    """Seconds to take pages of each kind and to lock them, and the rate of copies out of them."""
    if not setup.on_gpu:
        yield note_call("locking pages", "a CPU device locks none")
        return
    torch.cuda.init()
    num_bytes = (4 if setup.small else 2048) * MIB
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    kinds: dict[str, Callable[[int], Mapping[str, Any]]] = {
        "small pages, one range": lambda n: _lock(_plain(n, "MADV_NOHUGEPAGE")),
        "large pages where the kernel likes, one range": lambda n: _lock(map_pages(n)),
        "large pages, pieces by one thread": lambda n: _lock(map_pages(n), PIECE_BYTES, threads=1),
        "large pages, pieces by four threads": lambda n: _lock(map_pages(n), PIECE_BYTES, threads=4),
        "pages reserved by the system (hugetlb)": lambda n: _lock(_hugetlb(n)),
        "torch's pinned allocator": _lock_by_torch,
        "as a plan's arenas": _lock_by_arena,
    }
    for name, take in kinds.items():
        try:
            found = dict(take(num_bytes))
        except (OSError, RuntimeError) as error:
            yield note_call("locking pages fails", f"{type(error).__name__}: {error}", pages=name)
            continue
        flat, unlock = found.pop("flat"), found.pop("unlock", None)
        here = target[: flat.numel()]

        def copy(here: Tensor = here, flat: Tensor = flat) -> None:
            here.copy_(flat, non_blocking=True)

        copy_gb_s = flat.numel() / cuda.mean_s(copy, 0, 0.1) / GB
        torch.cuda.synchronize()
        if unlock is not None:
            begin_s = time.perf_counter()
            unlock()
            found["unlock_s"] = time.perf_counter() - begin_s
        total_s = found["touch_s"] + found["lock_s"]
        yield note_call("locked, GB/s", num_bytes / total_s / GB, pages=name, copy_gb_s=copy_gb_s, **found)
        del flat, copy


def _plain(num_bytes: int, advice: str) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(getattr(mmap, advice))
    return pages


def _hugetlb(num_bytes: int) -> mmap.mmap:
    """Raises OSError where the system has reserved none."""
    map_hugetlb = 0x40000  # MAP_HUGETLB of mmap(2); Python has no name for it
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_hugetlb)


def _lock(pages: mmap.mmap, piece_bytes: int = 0, threads: int = 1) -> dict[str, Any]:
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    piece_bytes = piece_bytes or flat.numel()
    begin_s = time.perf_counter()
    flat.zero_()
    touched_s = time.perf_counter()
    starts = range(0, flat.numel(), piece_bytes)
    with ThreadPoolExecutor(threads) as pool:
        lengths = [min(piece_bytes, flat.numel() - start) for start in starts]
        ends = list(pool.map(lock_pages, [flat.data_ptr() + start for start in starts], lengths))
    locked_s = time.perf_counter()
    return {  # a copy must be in one registration, so that of pieces the first is copied from
        "flat": flat[:piece_bytes], "unlock": lambda: [end() for end in ends], "touch_s": touched_s - begin_s,
        "lock_s": locked_s - touched_s,
    }  # fmt: skip


def _lock_by_torch(num_bytes: int) -> dict[str, Any]:
    begin_s = time.perf_counter()
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    locked_s = time.perf_counter()
    flat.zero_()
    return {"flat": flat, "touch_s": time.perf_counter() - locked_s, "lock_s": locked_s - begin_s}


def _lock_by_arena(num_bytes: int) -> dict[str, Any]:
    begin_s = time.perf_counter()
    flat = locked_memory(num_bytes)
    return {"flat": flat, "touch_s": 0.0, "lock_s": time.perf_counter() - begin_s}


def copies(setup: Setup) -> Iterator[Row]:
    """Copies one way, the other, and both at once; by size; from pages that are not locked."""
    if not setup.on_gpu:
        yield note_call("copies", "a CPU device makes none")
        return
    ways = {"to the GPU": (True, False), "from the GPU": (False, True), "both at once": (True, True)}
    rates = {name: cuda.Copies([0], *way).bandwidth() / GB for name, way in ways.items()}
    yield note_call("copies, GB/s", rates)
    yield note_call("both at once over the sum of each alone", rates["both at once"] / sum(list(rates.values())[:2]))
    for num_bytes in (64, 64 * 1024, MIB, 16 * MIB, *(() if setup.small else (256 * MIB,))):
        here = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        for kind, there in (("locked", here.cpu().pin_memory()), ("pageable", here.cpu())):

            def copy(here: Tensor = here, there: Tensor = there) -> None:
                here.copy_(there, non_blocking=True)

            seconds = cuda.mean_s(copy, 0, 0.05)
            yield note_call(
                "copy to the GPU, us", seconds * 1e6, bytes=num_bytes, pages=kind, gb_s=num_bytes / seconds / GB
            )


def host(setup: Setup) -> Iterator[Row]:
    """The host's time for each instruction, as `bench/host_cost.py` measures it, with real launches."""
    little = host_cost.LittleDram(setup.device, small=True, scratch=setup.scratch)
    batch = batch_of(host_cost.SIZE, host_cost.MICRO_BATCHES)
    options: dict[str, Any] = {"micro_batches": host_cost.MICRO_BATCHES, "optimizer": host_cost.ADAMW}
    jobs = {
        "resident": lambda: compile_job(little, gpt(host_cost.SIZE), batch, stages=4, **options),
        "swapped": lambda: swapping_job(little, gpt(host_cost.SIZE), batch, strategy=host_cost.FETCHING, **options),
    }
    for plan, make in jobs.items():
        with make() as job:
            job.step(batch)
            if setup.on_gpu:  # launches are timed on a stream of their own, whose workspaces no plan has room for
                torch.cuda.set_per_process_memory_fraction(1.0)
            found = host_cost.measure(job, batch)
        yield note_call("us of the host for an instruction", found.pop("us_an_instruction"), plan=plan, **found)


def adam(setup: Setup) -> Iterator[Row]:
    """The host's AdamW against torch's and DeepSpeed's, with one thread and with all, and while the links are busy."""
    every = torch.get_num_threads()
    for threads in dict.fromkeys((1, every)):
        for precision in ("fp32", "bf16"):
            found = optimizer.figures(precision, threads, rounds=2 if setup.small else 8)
            yield note_call("parameters a second over the faster rival's", found.pop("ratio"), **found)
    if setup.on_gpu:
        torch.set_num_threads(every)
        threads, params_per_s = cuda.busy_adamw([[0]])
        yield note_call("parameters a second while links are busy", params_per_s, threads=threads)


def nccl(setup: Setup) -> Iterator[Row]:
    """The costs of NCCL with one rank: its start, its memory, and a call of each collective."""
    if not setup.on_gpu:
        yield note_call("NCCL", "a CPU device has none")
        return
    torch.cuda.init()
    ones = torch.ones((1 if setup.small else 64) * MIB, device="cuda")
    torch.cuda.synchronize()
    free_bytes, begin_s = torch.cuda.mem_get_info()[0], time.perf_counter()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        dist.all_reduce(ones)
        torch.cuda.synchronize()
        start_s, taken = time.perf_counter() - begin_s, free_bytes - torch.cuda.mem_get_info()[0]
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield note_call("seconds to start NCCL", start_s, communicator_mib=taken / MIB, version=version)
        out = torch.empty_like(ones)
        calls: dict[str, Callable[[Tensor, Tensor], Any]] = {
            "all_reduce": lambda a, b: dist.all_reduce(a),
            "all_gather_into_tensor": lambda a, b: dist.all_gather_into_tensor(b, a),
            "reduce_scatter_tensor": lambda a, b: dist.reduce_scatter_tensor(b, a),
        }
        for name, collective in calls.items():
            seconds = cuda.mean_s(lambda run=collective: run(ones, out), 0, 0.1)
            begin_s = time.perf_counter()
            for _ in range(100):
                collective(ones[:64], out[:64])
            host_us = (time.perf_counter() - begin_s) * 1e4
            yield note_call(
                "collective of one rank, GB/s", ones.nbytes / seconds / GB, collective=name, host_us=host_us
            )
    finally:
        dist.destroy_process_group()
