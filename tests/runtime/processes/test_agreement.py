"""The values that ranks must agree on and the places that they must have: one sentence names the rank that differs."""

from __future__ import annotations

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.processes.agreement import differences, placement_text
from penstock.runtime.processes.rows import Member


def member(rank: int, node: str = "0", host: str = "alpha") -> Member:
    return Member(rank, f"id{rank}", node, host, 1000 + rank, 0.0, "10.0.0.1")


MEMBERS = [member(0), member(1), member(2, "1", "beta"), member(3, "1", "beta")]
SAME = {"torch": "2.13.0", "seed": "0"}


def test_nothing_is_said_where_all_agree() -> None:
    assert differences([SAME] * 4, MEMBERS) == ""


def test_who_differs_in_what_is_said() -> None:
    found = differences([SAME, SAME, {**SAME, "torch": "2.12.0"}, SAME], MEMBERS)
    assert "rank 2 (on beta) has torch 2.12.0, the others 2.13.0" in found
    two = differences([SAME, SAME, {**SAME, "seed": "1"}, {**SAME, "seed": "1", "file": "x"}], MEMBERS)
    assert "ranks 2, 3 have seed 1, the others 0" in two and "rank 3 (on beta) has file x, the others none" in two


def test_of_long_values_the_part_that_differs_is_shown() -> None:
    long = "a" * 500
    found = differences(
        [{"optimizer": f"{long} lr=0.1 {long}"}] * 3 + [{"optimizer": f"{long} lr=0.2 {long}"}], MEMBERS
    )
    assert "lr=0.2" in found and "lr=0.1" in found and len(found) < 500
    many = [{str(i): "0" for i in range(20)}] * 3 + [{str(i): "1" for i in range(20)}]
    assert "and 14 more differences" in differences(many, MEMBERS)


@pytest.mark.parametrize(
    ("nodes", "hosts", "fits"),
    [
        (["0", "0", "1", "1"], 2, True),
        (["0", "0", "0", "0"], 1, True),
        (["0", "0", "0", "0"], 2, True),  # the hosts are emulated
        (["0", "0", "0", "1"], 2, False),
        (["0", "0", "1", "1"], 1, False),
        (["0", "1", "2", "3"], 2, False),
    ],
)
def test_ranks_stand_where_the_plan_has_their_devices(nodes: list[str], hosts: int, fits: bool) -> None:
    devices = Hardware.cpu(4, hosts=hosts).devices
    found = placement_text([member(rank, node) for rank, node in enumerate(nodes)], devices)
    assert (found == "") == fits
    assert fits or ("the plan has" in found and "torchrun has started" in found)


def test_gpus_of_several_hosts_are_not_emulated() -> None:
    devices = Hardware.preset("mics-p3dn:2").devices[6:10]
    assert placement_text([member(rank) for rank in range(4)], devices).startswith(
        "the plan has 2 devices on each of 2 hosts"
    )
