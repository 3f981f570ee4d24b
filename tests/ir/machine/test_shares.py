"""Shares of a rate by messages, hosts and disks: in documents, at sizes between, in words, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.presets import preset_names
from penstock.papers.report import paper_module

MESSAGES, HOSTS, DISKS = {"64kB": 0.25, "1MB": 0.5, "16MB": 1}, {2: 1.0, 8: 0.9, 32: 0.4}, {1: 1, 4: 0.5}


def machine(**shares: Any) -> Hardware:
    """Two hosts with two CPU devices and four disks each."""
    document = Hardware.cpu(4, ssd="1GB", hosts=2, network="10GB/s", link="4GB/s").model_dump(mode="json")
    for host in document["hosts"]:
        host |= {name: curve for name, curve in shares.items() if name in Hardware.cpu().hosts[0].model_dump()}
        host["ssds"] = host["ssds"] * 4
    network = {"message_shares", "host_shares"}
    document["network"] |= {name: curve for name, curve in shares.items() if name in network}
    return Hardware.model_validate(document)


def test_messages_reach_their_share_of_the_network_and_of_what_joins_devices() -> None:
    here = machine(message_shares=MESSAGES, nvlink_message_shares={"1MB": 0.5, "4MB": 1.0})
    assert here.bandwidth("cpu0", "cpu1") == 4e9 and here.bandwidth("cpu0", "cpu1", 2e6) == pytest.approx(0.7071 * 4e9)
    there = [here.bandwidth("dram0", "dram1", size) for size in (1e3, 64e3, 1e6, 4e6, 16e6, 1e9)]
    assert there == pytest.approx([2.5e9, 2.5e9, 5e9, 10e9 * 0.7071, 10e9, 10e9])
    assert here.bandwidth("dram0", "cpu0", 1e3) == here.bandwidth("dram0", "cpu0")  # PCIe has none


def test_many_hosts_reach_less_of_the_network_each() -> None:
    network = machine(message_shares=MESSAGES, host_shares=HOSTS).network
    assert network is not None
    assert [network.bandwidth_at(1e9, hosts) / 1e9 for hosts in (2, 8, 16, 32, 99)] == pytest.approx([10, 9, 6, 4, 4])
    assert network.bandwidth_at(1e6, 8) == pytest.approx(0.5 * 9e9)


def test_disks_reach_a_share_of_the_sum_of_their_rates() -> None:
    assert machine().hosts[0].ssd_bandwidths == (4e9, 2e9)
    four = machine(ssd_shares=DISKS)
    assert four.hosts[0].ssd_bandwidths == (2e9, 1e9)
    links = four.links()
    assert (links["ssd0.read"].bandwidth, links["ssd0.0.read"].bandwidth) == (2e9, 1e9)
    assert four.with_(ssds=1).hosts[0].ssd_bandwidths == (1e9, 0.5e9)
    assert four.with_(ssds=0).hosts[0].ssd_bandwidths == (0, 0)


def test_a_document_says_them_in_plain_words(tmp_path: Path) -> None:
    here = machine(message_shares=MESSAGES, host_shares=HOSTS, ssd_shares=DISKS, nvlink_message_shares={4096: 0.5})
    here = here.with_(fitted_to={"mics fig2": "the network"})
    here.save(tmp_path / "machine.yaml")
    assert Hardware.load(tmp_path / "machine.yaml") == here
    written = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    assert written["network"]["message_shares"] == {"64kB": 0.25, "1MB": 0.5, "16MB": 1.0}
    assert written["network"]["host_shares"] == HOSTS and written["hosts"][0]["ssd_shares"] == DISKS
    assert Hardware.model_validate_json(here.model_dump_json()) == here
    text = here.describe()
    assert "messages of 64.0 kB: 25%, 1.00 MB: 50%, 16.0 MB: 100% of the rate" in text
    assert "over hosts, 2: 100%, 8: 90%, 32: 40% of the rate" in text and "fitted to mics fig2: the network" in text


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"message_shares": {"1MB": 1.2}}, r"network.message_shares: .* allowed: shares of at most 1; at 1e\+06 it is"),
        ({"message_shares": {"1MB": 0}}, "allowed: sizes and shares above 0; at 1e\\+06 the share is 0"),
        ({"message_shares": {"1MB": 0.1, "2MB": 0.9}}, "no larger message that takes less time than a smaller one"),
        ({"message_shares": 0.9}, "allowed: a mapping from sizes to shares"),
        ({"message_shares": {"1XB": 0.9}}, "unknown unit 'XB'"),
        ({"host_shares": {2.5: 0.9}}, "allowed: whole numbers of 1 or more as sizes, found 2.5"),
        ({"ssd_shares": {0: 1.0}}, r"hosts\[0\].ssd_shares: .* sizes and shares above 0"),
    ],
)
def test_a_wrong_curve_is_refused_with_its_key(shares: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        machine(**shares)


def test_a_document_without_shares_reaches_the_whole_rate() -> None:
    plain = machine()
    assert "shares" not in plain.to_yaml() and "fitted_to" not in plain.to_yaml()
    assert plain.bandwidth("dram0", "dram1", 10.0) == plain.bandwidth("dram0", "dram1") == 10e9


def test_every_preset_that_was_fitted_names_findings_that_exist_and_count_as_fitted() -> None:
    fitted = {name: Hardware.preset(name).fitted_to for name in preset_names()}
    assert {name.split("-")[0] for name, rows in fitted.items() if rows} == {"mics", "fuyou"}
    for rows in fitted.values():
        for row, what in rows.items():
            paper, _, key = row.partition(" ")
            assert paper_module(paper).FITTED[key] == what
