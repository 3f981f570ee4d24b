"""Plans that fill a card, in processes of their own: the allocator never has to give memory back, and holds no more
than the budget and what the reserve states for it."""

from __future__ import annotations

import pytest
import torch

from penstock.bench import cards
from penstock.tests.gpu.rehearsal import on_gpu, only_on_gpu

pytestmark = [*on_gpu, only_on_gpu]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "name",
    [
        "fetched from DRAM, dropout",
        pytest.param("1f1b", marks=[two_gpus, pytest.mark.multi]),
        pytest.param("zero-bubble", marks=[two_gpus, pytest.mark.multi]),
    ],
)
def test_a_full_card(name: str) -> None:
    found = cards.run(name)
    assert "error" not in found, found["error"]
    assert found["filled"] > 0.95
    for device in found["mib"].values():
        assert device["retries"] == 0
        assert device["reserved"] <= device["most"], found  # libraries' workspaces, and one part in 32 for gaps
        assert device["allocated"] <= device["reserved"]


@two_gpus
@pytest.mark.multi
@pytest.mark.parametrize("seed", ["1", "2"])
def test_devices_that_wait_for_each_others_messages_on_full_cards_end(seed: str) -> None:
    """Kernels of a millisecond, so that both hosts run far ahead of their GPUs."""
    found = cards.run("interleaved, 1 ms a kernel", FAKECUDA_SEED=seed)
    assert "error" not in found, found["error"]
    assert found["ok"] and found["retries"] == 0, found
