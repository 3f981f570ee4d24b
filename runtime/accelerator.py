"""The differences between makers of GPUs, and facts about GPUs that torch's own calls do not give.

torch built for ROCm answers to `torch.cuda` too, so streams, events and memory are the same calls there. The hardware
queues, the choice of visible GPUs and the library that knows the links between GPUs are not. GPUs of other kinds are
refused by what the device runtime lacks on them.

Streams are put into hardware queues; the setting of their number counts when the context is made. In a shared queue a
receive that waits for its peer holds up computation that the peer waits for.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.errors import HardwareError
from .torch_names import clear_cublas_workspaces, set_allocator_settings

GpuStream = torch.cuda.Stream
GpuEvent = torch.cuda.Event
GpuGraph = torch.cuda.CUDAGraph
# The functions that set the states of GPUs' generators, by their module.
SEEDS = {torch.cuda: ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")}


@dataclass(frozen=True)
class Vendor:
    """One maker's software.

    `queues`: the environment variable with the number of hardware queues, `num_queues` what the runtime needs there;
    `visible`: the variables that choose which GPUs a process sees.
    """

    queues: str
    num_queues: int
    visible: tuple[str, ...]


CUDA = Vendor("CUDA_DEVICE_MAX_CONNECTIONS", 32, ("CUDA_VISIBLE_DEVICES",))
# HIP makes 4 queues unless told otherwise; 16 is one for each stream of a device and those of its messages.
ROCM = Vendor("GPU_MAX_HW_QUEUES", 16, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Settings of CUDA, torch and NCCL under which a launch waits for kernels of other streams, and the values that do not.
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_LAUNCH_ORDER_IMPLICIT")
FALSE = ("", "0", "n", "no", "f", "false")
LACKING = {
    "xpu": (
        "memory of the host that it locks for copies by the GPU (cudaHostRegister has no counterpart in torch.xpu), "
        "and messages between GPUs through NCCL"
    ),
    "mps": "streams for copies beside computation, memory of its own beside the host's, and messages between GPUs",
}


def vendor() -> Vendor:
    """The maker whose GPUs this build of torch drives; CUDA's for a build without GPUs."""
    return ROCM if torch.version.hip else CUDA


def require_known_gpus() -> None:
    """Raises `HardwareError` if this machine's GPUs are of a kind that the device runtime cannot use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "cuda":
        return
    lacking = LACKING.get(found.type, "streams, events and page-locked memory that it has been run with")
    raise HardwareError(
        f"torch {torch.__version__} computes on {found.type!r}, where the device runtime lacks {lacking}. It runs on "
        'GPUs of CUDA and ROCm ("cuda" in torch), and on CPU devices: hardware=Hardware.cpu(num_devices=1)'
    )


def generator_of(device: torch.device) -> torch.Generator:
    """The random generator that ops on the device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def lock_pages(address: int, num_bytes: int) -> Callable[[], object]:
    """Let GPUs copy from and to this host memory by themselves. Returns what ends it."""
    cudart: Any = torch.cuda.cudart()  # HIP's under the same names
    torch.cuda.check_error(cudart.cudaHostRegister(address, num_bytes, 0))
    return lambda: cudart.cudaHostUnregister(address)


def links_bandwidth(index: int, major: int) -> float | None:
    """Usable bytes/s per direction between two GPUs over the maker's own links, for a GPU of capability `major`; None
    without such links, or without the maker's library to ask."""
    return _xgmi_bandwidth(index) if vendor() is ROCM else _nvlink_bandwidth(index, major)


def _nvlink_bandwidth(index: int, major: int) -> float | None:
    """All active NVLinks together, as a switch joins them. The rate of one follows from the architecture, since some
    drivers report a wrong version of the link."""
    try:
        import pynvml
    except ImportError:
        return None
    active = 0
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                active += bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass  # NVML answers "not supported" for links that a GPU does not have: what was found so far counts
    per_link = 20e9 if major <= 6 else 25e9 if major <= 9 else 50e9
    return 0.8 * active * per_link or None


def _xgmi_bandwidth(index: int) -> float | None:
    """The slowest of a GPU's Infinity Fabric links: each joins it with one other GPU."""
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # the module loads the driver's library from the place that ROCm names
        return None
    rates: list[float] = []
    try:
        amdsmi.amdsmi_init()
        try:
            handle = amdsmi.amdsmi_get_processor_handles()[index]
            for link in amdsmi.amdsmi_get_link_metrics(handle)["links"]:
                if link["link_type"] == amdsmi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI:
                    rates.append(float(link["max_bandwidth"]) * 1e9 / 8)  # Gb/s
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException:
        pass  # cards without links answer "not supported"
    return 0.8 * min((rate for rate in rates if rate), default=0.0) or None


@contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """While it lasts, torch's allocator takes memory of a GPU of CUDA in ranges that grow, one for each stream, instead
    of blocks that it cannot join: plans that fill a card lose several per cent of it between those. The user's
    environment may say otherwise."""
    global _growing
    said = any(word in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS for word in ("expandable", "backend"))
    if device.type != "cuda" or vendor() is not CUDA or sys.platform != "linux" or said:
        yield
        return
    with _growing_lock:
        _growing += 1
        set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        with _growing_lock:
            _growing -= 1
            if not _growing:
                set_allocator_settings("expandable_segments:False")


_growing = 0  # how many jobs of this process want it now
_growing_lock = threading.Lock()


def allocator_figures(device: torch.device) -> dict[str, int]:
    """The use of a GPU by torch's allocator since this process began, or since blocks were tried: the peaks of bytes in
    use and of bytes reserved, and the number of times that it had to release memory before it could reserve more."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:  # nothing was ever taken
        return {"allocated_bytes": 0, "reserved_bytes": 0, "retries": 0}
    return {
        "allocated_bytes": found["allocated_bytes"]["all"]["peak"],
        "reserved_bytes": found["reserved_bytes"]["all"]["peak"],
        "retries": found["num_alloc_retries"],
    }


def taken_bytes(device: torch.device) -> int:
    """The bytes of a GPU that values of this process take; 0 on a CPU device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the tensors' storages."""
    return {*map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors))}


def begin_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most of `taken_bytes` since `begin_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the calling thread's current one, and then what was before: the thread may be the user's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def use_gpu(device: torch.device) -> None:
    """Make a GPU the calling thread's current one for good: the thread is ours."""
    torch.cuda.set_device(device)


def current_stream(device: torch.device) -> GpuStream:
    """The stream of the calling thread's ops on this GPU."""
    return torch.cuda.current_stream(device)


def set_stream(stream: GpuStream) -> None:
    """Let the calling thread's next ops go to this stream."""
    torch.accelerator.set_stream(stream)  # torch.cuda's own does the same in three calls more


def on_stream(stream: GpuStream) -> AbstractContextManager[Any]:
    """Let the body's ops go to this stream, and then to the one before."""
    return torch.cuda.stream(stream)


def is_default_stream(stream: GpuStream, device: torch.device) -> bool:
    """Whether this is the stream on which a thread works that has chosen none."""
    return stream == torch.cuda.default_stream(device)


def settle(device: torch.device) -> None:
    """Wait for what the calling thread has put on its current stream of a GPU; on a CPU device there is no such."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def timed_event(blocking: bool = False) -> GpuEvent:
    """An event that knows when it was passed. `blocking`: a thread that waits for it sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=blocking)


def leave(device: torch.device) -> None:
    """Wait for all work of a GPU, and give back the workspaces of its products: one per stream, which torch else keeps
    for ever."""
    torch.cuda.synchronize(device)
    clear_cublas_workspaces()


def give_back(device: torch.device) -> None:
    """Wait for all work of a GPU, and give back all memory that torch holds of it for later use."""
    leave(device)
    torch.cuda.empty_cache()


def new_pool() -> Any:
    """Memory for graphs alone, which nothing else takes: the two numbers by which torch knows it."""
    return torch.cuda.graph_pool_handle()


@contextmanager
def capturing(graph: GpuGraph, pool: Any) -> Iterator[None]:
    """Note what the body puts on the current stream in the graph, and do not do it. What it takes is of the pool, the
    workspaces of products too: those that a stream has kept until then may be given back while the graph lives. Other
    threads may do what they like."""
    clear_cublas_workspaces()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):  # what the body did wrong may have ended the capture
            graph.capture_end()
        raise
    finally:
        clear_cublas_workspaces()


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Let torch raise RuntimeError where the host would wait for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch does not find every such call
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def pools_bytes(device: torch.device, pools: Collection[Any]) -> int:
    """Bytes of a GPU that torch's allocator holds for these pools."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = torch.cuda.memory_snapshot()
    own = (row for row in found if row["device"] == index and tuple(row["segment_pool_id"]) in pools)
    return sum(row["total_size"] for row in own)


def limit_allocator(device: torch.device, most_bytes: int) -> float:
    """Let torch's allocator take no more than this of a GPU's memory. Returns what `restore_allocator` needs."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    _, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total_bytes), device)
    return before


def restore_allocator(device: torch.device, before: float) -> None:
    """End what `limit_allocator` began."""
    torch.cuda.set_per_process_memory_fraction(before, device)


def num_gpus() -> int:
    """The number of GPUs that this process sees."""
    return torch.cuda.device_count()


def properties_of(gpu: torch.device | int) -> Any:
    """The driver's properties of a GPU: its name, memory and address."""
    return torch.cuda.get_device_properties(gpu)


@functools.cache
def has_flash(index: int) -> bool:
    """Whether torch has flash attention for a GPU: NVIDIA's from Ampere on."""
    return not torch.version.hip and torch.cuda.get_device_capability(index) >= (8, 0)


def take_stream(device: torch.device) -> GpuStream:
    """A stream that nobody else has: one that an earlier job has given back, else a new one. torch hands out the same
    32 again and again, so that two streams of one job could be one."""
    idle = _idle_streams[device]
    return idle.pop() if idle else torch.cuda.Stream(device)


def give_stream(device: torch.device, stream: GpuStream) -> None:
    """Give a stream back, unless it still waits for something: a peer may never answer."""
    with suppress(RuntimeError):  # a GPU in error
        if stream.query():
            _idle_streams[device].append(stream)


_idle_streams: dict[torch.device, list[GpuStream]] = defaultdict(list)


def queues() -> dict[str, str]:
    """The setting that gives every stream a hardware queue of its own, as a process's environment has it."""
    return {vendor().queues: str(vendor().num_queues)}


def take_queues() -> None:
    """Give every stream of this process's GPUs a hardware queue of its own.

    Raises `HardwareError` if the process uses its GPUs already, or sets another number itself: two devices that send to
    each other could then wait for ever.
    """
    ((setting, number),) = queues().items()
    found = os.environ.get(setting)
    if found is None and not torch.cuda.is_initialized():
        os.environ[setting] = number
    elif found != number:
        why = f"it is {found}" if found else "it is not set, and this process has used its GPU before the first step"
        raise HardwareError(
            f"{setting}: {why}; a receive could then hold up the computation that its sender waits for. Start the "
            f"script with {setting}={number} in its environment"
        )


def require_free_launches() -> None:
    """Raises `HardwareError` if the environment lets a launch wait for an earlier receive on another stream: two
    devices that send to each other could then wait for ever."""
    found = next((name for name in BLOCKING if os.environ.get(name, "0").lower() not in FALSE), None)
    if found is not None:
        raise HardwareError(
            f"{found}: it is {os.environ[found]}; messages between GPUs would wait for each other. Start the script "
            f"with {found}=0 in its environment, or without it"
        )


def gpu_of_rank(local_rank: int) -> int:
    """The index of the GPU of a host's rank among those that its process sees: its own number, or 0 where each rank
    sees one GPU only.

    Raises `HardwareError` for a rank that has no GPU.
    """
    present = torch.cuda.device_count()
    if local_rank < present:
        return local_rank
    if present == 1 and any(os.environ.get(setting) for setting in vendor().visible):
        return 0
    raise HardwareError(
        f"LOCAL_RANK={local_rank}: this process sees {present} GPUs. Start no more ranks on a host than it has GPUs "
        f"(--nproc-per-node={present or 1}), or give each rank one GPU by {vendor().visible[0]}"
    )
