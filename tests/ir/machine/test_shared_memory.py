"""One memory of a CPU and its GPU: what both may use together, and devices that ask for more."""

from __future__ import annotations

import re

import pytest

from penstock.compiler.own_copy import reserve_copies
from penstock.ir.errors import HardwareError
from penstock.ir.machine.describe import shared_text, shared_texts
from penstock.ir.machine.gpu_parts import PARTS, SERVERS
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import slice_of

SHARED = ["dgx-spark", "strix-halo", "jetson-orin", "jetson-thor"]


@pytest.mark.parametrize("name", SHARED)
def test_device_and_dram_are_budgets_of_one_memory_below_its_cap(name: str) -> None:
    hardware = Hardware.preset(name)
    (device,), (host,) = hardware.devices, hardware.hosts
    assert host.shared_memory and device.memory_bytes == host.dram_bytes
    assert device.budget_bytes + hardware.dram_budget_bytes() == host.usable_bytes == int(0.85 * host.dram_bytes)
    assert host.dram_bytes - host.usable_bytes > device.reserve.num_bytes  # type: ignore[union-attr]
    assert hardware.bandwidth("dram0", "gpu0") <= device.memory_bandwidth / 2  # a copy reads and writes it
    assert "the devices' memory too" in hardware.describe()
    assert shared_text(hardware, 0).startswith("gpu0 and dram0 are one memory of ")


def test_all_such_machines_have_a_preset_of_their_own() -> None:
    shared = {name for name, part in PARTS.items() if part.server and SERVERS[part.server].shared_memory}
    assert len(shared) == len(SHARED)
    others = [Hardware.preset(name) for name in ("rtx4090", "gh200", "h100x8")]
    assert not any(host.shared_memory for other in others for host in other.hosts)
    assert shared_text(others[0], 0) == "" and shared_texts(others[0]) == []
    assert shared_texts(Hardware.preset("gb10x1:64")) == [shared_text(Hardware.preset("dgx-spark"), 0)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": "200GB"}, "gpu0 may use 149 GiB, allowed: at most 101 GiB, which is 0.85 of the 119 GiB that"),
        ({"usable_fraction": 1.0}, "gpu0 may use 115 GiB, allowed: at most 101 GiB"),
        ({"dram": "64GB"}, "gpu0 may use 95.4 GiB, allowed: at most 50.7 GiB, which is 0.85 of the 59.6 GiB that"),
        ({"dram_usable_fraction": 0.5}, "gpu0 may use 95.4 GiB, allowed: at most 59.6 GiB, which is 0.5 of"),
    ],
)
def test_more_than_the_cap_is_refused_with_the_nearest_that_is_allowed(changes: dict[str, object], said: str) -> None:
    spark = Hardware.preset("dgx-spark")
    with pytest.raises(HardwareError, match=rf"hosts\[0\]\.shared_memory: {said}") as refused:
        spark.with_(**changes)
    nearest = re.search(r'nearest: memory="(.*)"', str(refused.value))
    assert nearest is not None
    allowed = spark.with_(**changes | {"memory": nearest[1]})
    assert allowed.budget_bytes("gpu0") + allowed.dram_budget_bytes() == allowed.hosts[0].usable_bytes


def test_what_the_device_leaves_is_drams() -> None:
    spark = Hardware.preset("dgx-spark")
    smaller = spark.with_(memory="64GB")
    assert smaller.budget_bytes("gpu0") < spark.budget_bytes("gpu0")
    assert sum(smaller.memories()[name] for name in ("gpu0", "dram0")) == spark.hosts[0].usable_bytes


def test_the_scripts_own_copy_counts_once_against_the_device() -> None:
    spark = Hardware.preset("dgx-spark")
    with_copy = reserve_copies(spark, [{"cpu": 10**10, "cuda:0": 10**9}])
    assert with_copy.budget_bytes("gpu0") == spark.budget_bytes("gpu0") - 11 * 10**9
    assert with_copy.dram_budget_bytes() == spark.dram_budget_bytes() and with_copy.hosts[0].model_bytes == 0


def test_lanes_divide_the_one_memory() -> None:
    whole = Hardware.cpu(3, memory="10MB", dram="31MB").with_(shared_memory=True)
    assert whole.dram_budget_bytes() == 1_000_000
    lane = slice_of(whole, [[0], [1], [2]])
    assert lane.budget_bytes("cpu0") == 10_000_000 and 3 * lane.dram_budget_bytes() <= 1_000_000
    assert Hardware.cpu(3, memory="10MB", dram="30MB").with_(shared_memory=True).dram_budget_bytes() == 0
