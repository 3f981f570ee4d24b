"""Shares of a root complex against arithmetic."""

from __future__ import annotations

from penstock.passes.partition_mip.shared_link import SharedLink


def ends(*transfers: tuple[int, float, float]) -> list[float]:
    """The end of each transfer: its device, when it may begin, and its seconds alone."""
    link = SharedLink()
    for name, (device, begin_s, work_s) in enumerate(transfers):
        link.add(device, name, begin_s, work_s)
    return [link.end_s(name) for name in range(len(transfers))]


def test_a_link_is_shared_evenly() -> None:
    assert ends((0, 1.0, 2.0)) == [3.0]
    assert ends((0, 0.0, 1.0), (1, 0.0, 2.0)) == [2.0, 3.0]
    assert ends((0, 0.0, 2.0), (1, 1.0, 0.5)) == [2.5, 2.0]
    assert ends((0, 0.0, 1.0), (1, 5.0, 1.0)) == [1.0, 6.0]


def test_transfers_of_a_device_follow_each_other() -> None:
    assert ends((0, 0.0, 1.0), (1, 0.0, 2.0), (0, 0.0, 9.0)) == [2.0, 4.0, 12.0]
    assert ends((0, 0.0, 1.0), (0, 3.0, 1.0), (1, 3.5, 2.0)) == [1.0, 4.5, 6.0]


def test_what_begins_later_may_be_added_later() -> None:
    link = SharedLink()
    link.add(0, 0, 0.0, 2.0)
    assert link.end_s(0) == 2.0
    link.add(1, 1, 2.0, 1.0)
    link.add(0, 2, 2.5, 1.0)
    assert (link.end_s(1), link.end_s(2)) == (3.5, 4.0)
