"""Width beside shards on processes of their own, over gloo: members of a team have parts of weights, and lanes in the
same place of several teams share these."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_steps_like_eager, zoo_case
from penstock.tests.compiler.fleet_matrix import DEVICE, DRAM, SSD, TIERS

REORDERED = 5e-6  # sums over columns and members have another order
BEFORE = "drop-masks, split-width{team=2}, coarsen, "
CUT = "partition-balanced{stages=4}, map-round-robin, schedule-pipeline, "
# The number of devices, the mesh, and the tier of shards.
LAYOUTS = {
    "device": (4, "mesh{shards=2}", DEVICE),
    "dram": (4, "mesh{shards=2}", DRAM),
    "ssd": (4, "mesh{shards=2}", SSD),
    "deep": (8, "mesh{shards=2, depth=2}", DEVICE),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_members_train_as_eager_and_are_saved_whole(layout: str, tmp_path: Path) -> None:
    """Gradients are clipped by a norm in which what all members have counts once. A checkpoint goes on on one device,
    and a checkpoint of one device here."""
    devices, mesh, tier = LAYOUTS[layout]
    model, batch = zoo_case("qwen3")
    start, eager = copy.deepcopy(model), Eager(model, max_grad_norm=0.5)
    given: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 2, "max_grad_norm": 0.5}
    line = f"{BEFORE}{mesh}, {CUT}{TIERS[tier, True]}"
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB", ssd="1GB")
    with penstock.compile(model, hardware, strategy=line, ssd_dirs=[str(tmp_path)], **given) as job:
        assert_steps_like_eager(job, eager, batch, REORDERED)
        saved = job.save(tmp_path / "after 2")
    with penstock.compile(copy.deepcopy(start), penstock.Hardware.cpu(num_devices=1), **given) as job:
        job.resume(saved)
        assert_steps_like_eager(job, eager, batch, REORDERED, steps=1)
        saved = job.save(tmp_path / "after 3")
    with penstock.compile(start, hardware, strategy=line, ssd_dirs=[str(tmp_path)], **given) as job:
        job.resume(saved)
        assert_steps_like_eager(job, eager, batch, REORDERED, steps=1)
        assert_close(job.state_dict(), eager.model.state_dict(), REORDERED)
