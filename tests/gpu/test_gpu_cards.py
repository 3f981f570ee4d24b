"""Plans that fill a card, in processes of their own: the allocator never has to give memory back, and holds no more
than the budget and what the reserve states for it. Kernels compute nothing, so that no more of this machine's memory is
needed than for the processes themselves. `bench/cards.py` has more plans, on larger cards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.bench import cards
from penstock.tests.gpu.rehearsal import on_gpu, only_on_gpu

pytestmark = [*on_gpu, only_on_gpu]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def holds_no_more_than_it_may(found: dict[str, Any]) -> None:
    assert "error" not in found, found["error"]
    assert found["filled"] > 0.95
    for device in found["mib"].values():
        assert device["retries"] == 0
        assert device["reserved"] <= device["most"], found  # libraries' workspaces, and one part in 32 for gaps
        assert device["allocated"] <= device["reserved"]
        assert device["pooled"] <= device["most"]


@pytest.mark.parametrize(
    "name",
    [
        "fetched from DRAM, dropout",
        "small, whole logits",
        pytest.param("small, 1f1b", marks=[two_gpus, pytest.mark.multi]),
        pytest.param("small, 1f1b, NVLink", marks=[two_gpus, pytest.mark.multi]),  # what NCCL takes is not a plan's
        pytest.param("small, mobius", marks=[two_gpus, pytest.mark.multi]),  # two large pools on a device
        pytest.param("small, zero-bubble", marks=[two_gpus, pytest.mark.multi]),
    ],
)
def test_a_full_card(name: str) -> None:
    holds_no_more_than_it_may(cards.run(name))


def test_a_full_part_of_a_larger_gpu() -> None:
    """Its allocator's gaps lie in what a plan may not use of the part."""
    holds_no_more_than_it_may(cards.run("small, whole logits", FAKECUDA_MEMORY=str(24 * 2**30)))


@two_gpus
@pytest.mark.multi
@pytest.mark.parametrize("seed", ["1", "2"])
def test_devices_that_wait_for_each_others_messages_on_full_cards_end(seed: str) -> None:
    """Kernels of a millisecond, so that both hosts run far ahead of their GPUs."""
    holds_no_more_than_it_may(cards.run("small, interleaved, 1 ms a kernel", FAKECUDA_SEED=seed))
