"""The tables of known GPUs and servers: complete, sourced, with figures that agree with each other."""

from __future__ import annotations

import re

import pytest

from penstock.ir.machine.gpu_parts import PARTS, SERVERS
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.part_rates import MEASURED
from penstock.ir.machine.presets import gpu, preset_names

EVERY_CARD = """
    3060, 3060 Ti, 3070, 3070 Ti, RTX 3080, 3080 12GB, 3080 Ti, 3090, 3090 Ti, 4060, 4060 Ti 16GB, 4070, 4070 Super,
    4070 Ti, 4070 Ti Super, 4080, 4080 Super, 4090, 5060, 5060 Ti 8GB, 5070, 5070 Ti, 5080, 5090, 3060 Laptop,
    3070 Laptop, 3080 Laptop, 3080 Ti Laptop, 4060 Laptop, 4070 Laptop, 4080 Laptop, 4090 Laptop, 5060 Laptop,
    5070 Laptop, 5070 Ti Laptop, 5080 Laptop, 5090 Laptop, RTX A4000, RTX A4500, RTX A5000, RTX A5500, RTX A6000,
    RTX 4000 Ada, RTX 4500 Ada, RTX 5000 Ada, RTX 6000 Ada, RTX PRO 4000, RTX PRO 4500, RTX PRO 5000, RTX PRO 6000, T4,
    L4, L40S, A10, A40, A100 40GB, A100 80GB, A100 PCIe 40GB, A100 80GB PCIe, H100 PCIe, H100 SXM, H100 NVL, H200, B200,
    B300, GH200, GB200, MI250X, MI300X, MI325X, MI355X, DGX Spark, GB10, Strix Halo, Jetson Orin, Jetson Thor
"""


@pytest.mark.parametrize("typed", [card.strip() for card in EVERY_CARD.split(",")])
def test_every_card_that_people_have_is_known(typed: str) -> None:
    hardware = Hardware.preset(typed)
    assert hardware.num_devices == 1 and len(hardware.source) > 60


def test_every_part_is_listed_under_a_name_of_its_own() -> None:
    names = preset_names()
    assert len(names) == len(set(names)) and {f"{part}x1" for part in PARTS} <= set(names)
    assert len({re.sub("[^a-z0-9]", "", part) for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_the_figures_of_a_part_agree_with_each_other(name: str) -> None:
    part, document = PARTS[name], gpu(name, 0)
    peak = document["peak_flops"]
    assert (
        peak["fp16"] > peak["fp32"] and ("bf16" in peak) == part.bf16 and peak.get("bf16", peak["fp16"]) == peak["fp16"]
    )
    assert document["h2d_bandwidth"] <= document["memory_bandwidth"] >= document["d2h_bandwidth"]
    assert re.search(r"datasheet|whitepaper|TechPowerUp|guide|brief|figures|https?|\w\.\w+/", part.source), part.source
    assert (name in MEASURED) != ("no table of rates" in part.source)
    assert part.server is None or part.server in SERVERS


def test_cards_without_bf16_compute_in_fp32_and_fp16() -> None:
    assert {name for name, part in PARTS.items() if not part.bf16} == {"rtx2080ti", "t4", "v100-16gb", "v100-32gb"}
    assert set(Hardware.preset("T4").devices[0].peak_flops) == {"fp32", "fp16"}


def test_every_server_is_of_a_part_and_has_a_source() -> None:
    assert {part.server for part in PARTS.values()} - {None} == SERVERS.keys()
    assert all(len(server.source) > 10 for server in SERVERS.values())
    assert Hardware.preset("gb200x4:2").num_devices == 8  # two whole trays
    assert Hardware.preset("gh200x1:3").num_devices == 3


def test_both_directions_of_a_link_are_apart() -> None:
    """A GH200 reads Grace's memory faster than it writes it."""
    grace = Hardware.preset("gh200")
    assert (grace.bandwidth("dram0", "gpu0"), grace.bandwidth("gpu0", "dram0")) == (375e9, 297e9)
    tray = Hardware.preset("gb200x4")
    assert [device.root_complex for device in tray.devices] == [0, 0, 1, 1]  # two GPUs to a Grace
    assert tray.bandwidth("dram0", "gpu3") > tray.bandwidth("gpu3", "dram0")


def test_fewer_lanes_carry_their_part() -> None:
    eight, sixteen = (Hardware.preset(name) for name in ("rtx4060", "rtx4070"))
    assert eight.bandwidth("dram0", "gpu0") == sixteen.bandwidth("dram0", "gpu0") / 2 == 13e9


def test_a_large_card_has_twice_its_memory_in_dram_and_a_data_centres_card_drives_no_display() -> None:
    large, small = Hardware.preset("rtxpro6000"), Hardware.preset("rtx4090")
    assert (large.hosts[0].dram_bytes, small.hosts[0].dram_bytes) == (192e9, 64e9)
    displays = [Hardware.preset(name).devices[0].reserve for name in ("l40s", "rtx4090")]
    assert [reserve.display_bytes > 0 for reserve in displays if reserve is not None] == [False, True]


@pytest.mark.parametrize(("name", "mib"), [("t4", 15360), ("l4", 23034), ("a40", 46068), ("l40s", 46068)])
def test_ecc_takes_a_part_of_the_memory_of_cards_for_servers(name: str, mib: int) -> None:
    """As nvidia-smi counts it."""
    assert PARTS[name].gib == pytest.approx(mib / 1024, rel=1e-3)
    assert Hardware.preset(f"{name} {round(mib / 1024 * 16 / 15)}GB").name == f"{name}x1"
