"""One of the processes that stand for hosts in `test_network.py`."""

from __future__ import annotations

from multiprocessing.queues import SimpleQueue
from typing import Any

import torch.distributed as dist

from penstock.runtime.measure.network import network_rates

HOSTS = 3
SIZES = (1024, 65536, 1 << 20)


def host(index: int, folder: str, found: SimpleQueue[Any]) -> None:
    found.put((index, network_rates(dist.FileStore(f"{folder}/store", HOSTS), index, HOSTS, SIZES)))
