"""What the runtime must know of GPUs beside torch's own calls: hardware queues, a rank's GPU, the current one.

CUDA puts streams into hardware queues, 8 unless CUDA_DEVICE_MAX_CONNECTIONS says more; the setting counts when the
context is made. In a shared queue a receive that waits for its peer holds up computation that the peer waits for.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..ir.errors import HardwareError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
VISIBLE = "CUDA_VISIBLE_DEVICES"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the calling thread's current one, and then what was before: the thread may be the user's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def take_queues() -> None:
    """Give every stream of this process's GPUs a hardware queue of its own.

    Raises `HardwareError` if the process uses its GPUs already, or sets another number itself: two devices that send to
    each other could then wait for ever.
    """
    found = os.environ.get(QUEUES)
    if found is None and not torch.cuda.is_initialized():
        os.environ[QUEUES] = str(MOST_QUEUES)
    elif found != str(MOST_QUEUES):
        why = f"it is {found}" if found else "it is not set, and this process has used its GPU before the first step"
        raise HardwareError(
            f"{QUEUES}: {why}; a receive could then hold up the computation that its sender waits for. Start the "
            f"script with {QUEUES}={MOST_QUEUES} in its environment"
        )


def gpu_of_rank(local_rank: int) -> int:
    """The index of the GPU of a host's rank among those that its process sees: its own number, or 0 where each rank
    sees one GPU only.

    Raises `HardwareError` for a rank that has no GPU.
    """
    present = torch.cuda.device_count()
    if local_rank < present:
        return local_rank
    if present == 1 and os.environ.get(VISIBLE):
        return 0
    raise HardwareError(
        f"LOCAL_RANK={local_rank}: this process sees {present} GPUs. Start no more ranks on a host than it has GPUs "
        f"(--nproc-per-node={present or 1}), or give each rank one GPU by {VISIBLE}"
    )
