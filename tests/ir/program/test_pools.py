"""Pools of a GPU's memory: what they come to hold together, and what each may hold of a budget."""

from __future__ import annotations

import pytest

from penstock.ir import ops
from penstock.ir.machine.presets import gaps_bytes
from penstock.ir.program import Program, pooled_bytes, pools_of, profile_memory
from penstock.tests.ir.program.handmade import pipeline


def splitting() -> list[Program]:
    """Pipelines whose gradients of parameters come last: then nothing that was received is there any more."""
    return pipeline(2, 4, 4, fetched=False, kept=True, split=True, rows=64, width=8)


@pytest.mark.parametrize("device", [0, 1])
def test_pools_keep_their_peaks_whenever_these_are_reached(device: int) -> None:
    program = splitting()[device]
    profile, peaks = profile_memory(program), pools_of(program).peaks
    lasting = profile.persistent.total(ops.DEVICE) + profile.arena_bytes
    assert pooled_bytes(program) == lasting + sum(peaks.values())
    assert pooled_bytes(program) > profile.peak_bytes[ops.DEVICE]


def test_a_single_stream_holds_the_peak() -> None:
    (only,) = pipeline(1, 1, 2, fetched=False, kept=True)
    assert pooled_bytes(only) == profile_memory(only).peak_bytes[ops.DEVICE]


def test_room_for_the_gaps_of_other_large_pools_stays_free() -> None:
    pools = pools_of(splitting()[1])
    assert pools.peaks.keys() == {"compute", "recv"}
    pools.totals["recv"] = pools.totals["compute"] = 10**6
    pools.peaks["recv"] = pools.peaks["compute"] = 3000
    shares = pools.shares(8000)
    assert sum(shares.values()) == 8000 - gaps_bytes(8000)
    pools.peaks["recv"] = gaps_bytes(8000)  # a small one
    assert sum(pools.shares(8000).values()) == 8000
    assert pools.shares(3000) == dict(pools.peaks)  # what they need, whatever the budget
