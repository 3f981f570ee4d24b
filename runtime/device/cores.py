"""Which cores of a host the optimizer of a GPU uses: all of the GPU's share but those that feed it.

The thread that issues work to a GPU, and those that read and write disks, must never wait for a core behind the
optimizer's (Fuyou 4.3: the two are decoupled), else the GPU idles.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

FOR_ISSUING = 2  # cores: one for the thread that issues, one for disks and messages
FEWEST_TO_SPLIT = 4  # a share below this keeps one core free, a single one none


def available_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def optimizer_cores(cores: Sequence[int], place: int, count: int) -> list[int]:
    """The cores for the optimizer of the GPU number `place` of `count` on this host, out of its equal share."""
    assert 0 <= place < count and cores
    share = list(cores[place * len(cores) // count : (place + 1) * len(cores) // count]) or [cores[place % len(cores)]]
    free = FOR_ISSUING if len(share) >= FEWEST_TO_SPLIT else min(1, len(share) - 1)
    return share[free:]


def use_cores(cores: Sequence[int]) -> None:
    """Keep the calling thread, and the threads that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)
