"""One of the processes that stand for hosts in `test_network.py` and `test_gpu_network.py`."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.measure.network import network_rates

HOSTS = 3
SIZES = (1024, 65536, 1 << 20)


def host(index: int, folder: str, found: SimpleQueue[Any], kind: str = "cpu") -> None:
    """On GPUs, each host has one of them."""
    device = torch.device(kind, index if kind == "cuda" else 0)
    found.put((index, network_rates(dist.FileStore(f"{folder}/store", HOSTS), index, HOSTS, SIZES, device)))


def timed_by_all(folder: str, kind: str = "cpu") -> dict[int, dict[str, Any]]:
    """The measurements of each host, by its number."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    processes = [context.Process(target=host, args=(index, folder, found, kind)) for index in range(HOSTS)]
    for process in processes:
        process.start()
    try:
        return dict(found.get() for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
