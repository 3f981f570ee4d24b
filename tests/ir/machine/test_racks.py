"""Racks of hosts with an uplink each, and hosts that a document writes once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware

RACKS = {"hosts_per_rack": 2, "oversubscription": 4}


def fleet(racks: dict[str, Any] | None = None, copies: int = 6, **changes: Any) -> dict[str, Any]:
    """Hosts of two CPU devices, as a document that says one of them."""
    document = Hardware.cpu(num_devices=2).model_dump(exclude_defaults=True)
    network = {"bandwidth": "10GB/s", "racks": racks} if racks else {"bandwidth": "10GB/s"}
    return {**document, "copies": copies, "network": network, **changes}


def test_what_goes_between_racks_passes_both_uplinks() -> None:
    hardware = Hardware.from_any(fleet(RACKS))
    assert hardware.racks == [0, 0, 1, 1, 2, 2]
    assert hardware.path("dram0", "dram1") == ["nic0.up", "nic1.down"]
    assert hardware.path("dram1", "dram4") == ["nic1.up", "rack0.up", "rack2.down", "nic4.down"]
    assert hardware.links()["rack0.up"].bandwidth == 2 * 10e9 / 4
    assert hardware.bandwidth("dram1", "dram4") == 5e9 and hardware.bandwidth("dram0", "dram1") == 10e9
    assert "3 racks of 2 hosts, an uplink of 5.00 GB/s each (4 to 1)" in hardware.describe()
    graph, links = hardware.graph(), hardware.links()
    for dst in ("dram1", "dram4", "cpu11"):
        at = "cpu0"
        for link in hardware.path("cpu0", dst):
            assert (links[link].tail, graph.has_edge(at, links[link].head, link)) == (at, True)
            at = links[link].head
        assert at == dst


def test_racks_by_number_and_by_uplink() -> None:
    racks = {"rack_of_host": [1, 1, 1, 7, 7, 1], "uplink_bandwidth": "80Gb/s", "latency_s": "4us"}
    hardware = Hardware.from_any(fleet(racks))
    assert hardware.path("dram5", "dram3") == ["nic5.up", "rack1.up", "rack7.down", "nic3.down"]
    assert hardware.latency_s("dram5", "dram3") == pytest.approx(hardware.latency_s("dram0", "dram1") + 4e-6)
    assert hardware.links()["rack7.down"].bandwidth == 10e9
    assert "1 racks of 4 hosts and 1 racks of 2 hosts" in hardware.describe()


@pytest.mark.parametrize(
    ("racks", "said"),
    [
        ({"hosts_per_rack": 2}, "one of uplink_bandwidth and oversubscription; this has neither"),
        ({**RACKS, "rack_of_host": [0] * 6}, "one of hosts_per_rack and rack_of_host; this has both"),
        ({**RACKS, "hosts_per_rack": 0}, r"network.racks.hosts_per_rack: found 0, allowed: greater than 0"),
        ({**RACKS, "oversubscription": float("inf")}, r"network.racks.oversubscription: found inf, allowed: a finite"),
        ({"rack_of_host": [0, 1], "oversubscription": 2}, r"rack_of_host: found 2 numbers, allowed: one for each of"),
        ({"hosts": 2}, "unknown key"),
    ],
)
def test_racks_that_cannot_be(racks: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        Hardware.from_any(fleet(racks))


def test_hosts_are_written_once_and_read_many_times(tmp_path: Path) -> None:
    hardware = Hardware.from_any(fleet(RACKS))
    assert [device.name for device in hardware.devices] == [f"cpu{i}" for i in range(12)]
    assert [device.host for device in hardware.devices] == [i // 2 for i in range(12)] and len(hardware.hosts) == 6
    hardware.save(tmp_path / "fleet.yaml")
    written = yaml.safe_load((tmp_path / "fleet.yaml").read_text())
    assert (written["copies"], len(written["devices"])) == (6, 2)
    assert Hardware.load(tmp_path / "fleet.yaml") == hardware
    more = hardware.with_(memory="1GB", network={"bandwidth": "20GB/s"})
    assert {device.memory_bytes for device in more.devices} == {10**9} and len(more.hosts) == 6


def test_hosts_that_differ_are_all_written(tmp_path: Path) -> None:
    document = Hardware.from_any(fleet()).model_dump()
    document["devices"][7]["memory_bytes"] -= 1
    other = Hardware.from_any(document)
    other.save(tmp_path / "fleet.yaml")
    assert "copies" not in (tmp_path / "fleet.yaml").read_text()
    assert Hardware.load(tmp_path / "fleet.yaml") == other


def test_copies_that_cannot_be() -> None:
    for copies in (0, "2", True):
        with pytest.raises(HardwareError, match=r"copies: found .*, allowed: a whole number from 1 to 100,000"):
            Hardware.from_any(fleet(copies=copies))
    document = fleet()
    document["devices"][1]["name"] = "other"
    with pytest.raises(HardwareError, match="copies: 6 of devices named cpu0, other; allowed: one word and numbers"):
        Hardware.from_any(document)
    one = {key: value for key, value in fleet().items() if key != "network"}
    with pytest.raises(HardwareError, match="network: missing for 6 hosts"):
        Hardware.from_any(one)


def test_presets_of_fleets_say_racks_in_their_names() -> None:
    hardware = Hardware.preset("h100x8:6-rack3-over1.5")
    assert (hardware.num_devices, hardware.racks) == (48, [0, 0, 0, 1, 1, 1])
    assert hardware.links()["rack1.up"].bandwidth == pytest.approx(2 * hardware.links()["nic0.up"].bandwidth)
    assert "racks of 3 hosts, 1.5 to 1, as asked" in hardware.source
    assert Hardware.preset("mics-p4d:8-rack4").links()["rack0.up"].bandwidth == pytest.approx(4 * 50e9)
    with pytest.raises(HardwareError, match="a rack has 1 host or more"):
        Hardware.preset("h100x8:6-rack0")
    with pytest.raises(HardwareError, match="no hardware preset 'h100x4:2'"):
        Hardware.preset("h100x4:2")
