"""The setup of a device crosses to its process as JSON and is equal there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.device.pacing import Paces
from penstock.runtime.device.setup import DeviceSetup, HostShare
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.tests.ir.program.handmade import pipeline

PACES = [
    Paces(),
    Paces("links", "turns", {"step": {3: 0, 4: 1}, "evaluate": {}}, {"step": {7: 0.1}}),
    Paces("links", waits_s=[0.5, None]),
]


@pytest.mark.parametrize("paces", PACES, ids=["alone", "shared", "rehearsed"])
def test_a_setup_crosses_to_another_process(paces: Paces) -> None:
    (program, _) = pipeline(2, 2, 2)
    adamw = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9)))
    share = HostShare(1, 4, 1 << 20, ("/mnt/a", "/mnt/b"), True, "127.0.0.1")
    hardware = Hardware.cpu(2, memory="8MB", ssd="64MB")
    setup = DeviceSetup(1, Path("device1.py"), program.interface, hardware, adamw, "bf16", 5, 60.0, share, paces)
    assert DeviceSetup.from_json(json.loads(json.dumps(setup.to_json()))) == setup
    assert setup.dram_budget_bytes == 1 << 20
