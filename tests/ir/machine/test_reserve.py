"""The part of a GPU's memory that is not a plan's: stated part by part, and outside of a part of the memory."""

from __future__ import annotations

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.presets import stated_reserve

GIB, MIB = 2**30, 2**20


def test_a_small_card_keeps_the_parts_that_are_stated() -> None:
    (device,) = Hardware.preset("laptop-16gb").devices
    assert device.memory_bytes == 8 * GIB and device.reserve is not None
    stated = stated_reserve(1, display=True, memory_bytes=8 * GIB)
    assert device.reserve.num_bytes == sum(stated.values()) == (512 + 64 + 512 + 256) * MIB
    assert device.budget_bytes == 8 * GIB - device.reserve.num_bytes < int(0.94 * 8 * GIB)
    assert device.budget_bytes < 7154 * MIB  # of a resident plan, for which such a card with a desktop has no room


def test_on_a_large_card_the_usable_part_is_less_than_what_the_reserve_leaves() -> None:
    device = Hardware.preset("h100x2").devices[0]
    assert device.reserve is not None and device.reserve.messages_bytes == 256 * MIB
    assert device.budget_bytes == int(0.94 * 80 * GIB) < 80 * GIB - device.reserve.num_bytes


def test_what_the_allocator_loses_between_values_grows_with_the_memory() -> None:
    device = Hardware.preset("rtx4090x2").devices[0]
    assert device.reserve is not None and device.reserve.gaps_bytes == 768 * MIB
    assert device.budget_bytes == 24 * GIB - device.reserve.num_bytes < int(0.94 * 24 * GIB)


def test_a_display_of_two_gib_has_room_beside_a_smaller_part_for_plans() -> None:
    """As the page about choosing a machine says."""
    device = Hardware.preset("rtx4090x1").with_(usable_fraction=0.86).devices[0]
    assert device.reserve is not None
    others = device.reserve.num_bytes - device.reserve.display_bytes
    assert device.memory_bytes - device.budget_bytes - others >= 2 * GIB


def test_a_limit_leaves_the_reserve_in_the_rest_of_the_card() -> None:
    laptop = Hardware.preset("laptop-16gb")
    assert laptop.with_(memory="4GB").devices[0].reserve is None
    assert laptop.with_(memory="4GB").devices[0].budget_bytes == int(0.94 * 4e9)
    assert laptop.with_(memory="8GB").devices[0].reserve == laptop.devices[0].reserve  # the rest is too small


def test_a_user_may_state_it() -> None:
    laptop = Hardware.preset("laptop-16gb")
    stated = laptop.with_(reserve={"context_bytes": "300MiB"}).devices[0]
    assert stated.budget_bytes == int(0.94 * 8 * GIB)  # 300 MiB are less than 6 %
    assert laptop.with_(reserve={"display_bytes": "9GiB"}).devices[0].budget_bytes == 0
    assert laptop.with_(reserve=None).devices[0].reserve is None


@pytest.mark.parametrize("name", ["mobius-8gpu", "ftpipe-2080ti", "fuyou-4090"])
def test_the_machines_of_papers_have_only_the_usable_part(name: str) -> None:
    device = Hardware.preset(name).devices[0]
    assert device.reserve is None and device.budget_bytes == int(0.94 * device.memory_bytes)
