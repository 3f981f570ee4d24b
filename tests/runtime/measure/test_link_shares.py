"""The shares of their rates that messages and disks reach, from measured times."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.measure.disks import rates_of_disks, together_share
from penstock.runtime.measure.links import link_shares

SIZES = (65_536, 524_288, 8_388_608)


def test_shares_are_those_of_the_largest_message_without_the_latency() -> None:
    found = link_shares(1e-4, {1000: 1.02e-4, 100_000: 2e-4, 1_000_000: 6e-4})
    assert found == {"link": pytest.approx(2e9), "link_shares": {1000: 0.25, 100_000: 0.5, 1_000_000: 1.0}}
    hardware = Hardware.cpu(2).with_(nvlink_bandwidth=found["link"], nvlink_message_shares=found["link_shares"])
    assert hardware.bandwidth("cpu0", "cpu1", 1000) == pytest.approx(5e8)


def test_a_link_that_is_as_good_with_small_messages_has_no_shares() -> None:
    assert link_shares(1e-4, {1000: 1.001e-4, 1_000_000: 6e-4}) == {"link": pytest.approx(2e9), "link_shares": None}


@given(st.lists(st.floats(1e-6, 1e-2), min_size=3, max_size=3), st.floats(0.0, 1e-3))
def test_noise_makes_no_curve_that_a_document_refuses(took_s: list[float], latency_s: float) -> None:
    """Larger messages may have taken less than smaller ones, and any of them less than an empty one."""
    found = link_shares(latency_s, dict(zip(SIZES, took_s)))
    Hardware.cpu(2).with_(nvlink_bandwidth=found["link"], nvlink_message_shares=found["link_shares"])


def test_disks_that_slow_each_other_down_have_a_share() -> None:
    alone = [{"disk_read": 2e9, "disk_write": 1e9}, {"disk_read": 4e9, "disk_write": 1e9}]
    together = [{"disk_read": 1e9, "disk_write": 0.6e9}, {"disk_read": 2e9, "disk_write": 0.6e9}]
    assert together_share(alone, together) == pytest.approx((0.5 + 0.6) / 2)
    assert together_share(together, alone) == 1.0  # noise


@pytest.mark.slow
def test_two_directories_are_timed_alone_and_at_once(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    found = rates_of_disks(places, slice_s=0.05)
    assert len(found["disks"]) == 2 and 0 < found["disk_shares"][2] <= 1 == found["disk_shares"][1]
    assert rates_of_disks(places[:1], slice_s=0.01)["disk_shares"] is None
