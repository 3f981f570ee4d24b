"""The network between hosts, timed between processes of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.processes.joint_hardware import combine
from penstock.runtime.processes.rows import Member
from penstock.tests.compiler.job.agents import agents
from penstock.tests.runtime.measure.timed_host import HOSTS, timed_by_all

SCRIPT = """
import sys
from penstock.cli.main import main
main(["hardware", "detect", "--save", sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.multi
def test_three_processes_time_what_lies_between_them(tmp_path: Path) -> None:
    rows = timed_by_all(str(tmp_path))
    first, other = rows[0], rows[2]
    assert not other
    assert 1e7 < first["bandwidth"] < 1e12 and 0 < first["latency_s"] < 1
    assert first["host_shares"] is None or list(first["host_shares"]) == [2, HOSTS]
    assert Hardware.cpu(2, hosts=2).with_(network=first).network is not None


@pytest.mark.slow
@pytest.mark.multi
def test_a_torchrun_over_two_hosts_describes_the_machine_that_they_form(tmp_path: Path) -> None:
    script, document = tmp_path / "script.py", tmp_path / "machine.yaml"
    script.write_text(SCRIPT)
    with agents(tmp_path / "agents", str(document), nodes=2, per_node=1, script=script) as started:
        codes = [process.wait(200) for process in started.processes]
        assert codes == [0, 0], started.logs
    found = Hardware.from_any(str(document))
    assert [device.host for device in found.devices] == [0, 1]
    assert found.network is not None and found.network.bandwidth > 1e7
    assert "measured between them" in found.source


def test_the_links_of_the_devices_are_no_part_of_the_networks_latency() -> None:
    members = [Member(rank, str(rank), str(rank), f"host{rank}", 100 + rank, 0.0, "10.0.0.1") for rank in range(2)]
    document = Hardware.cpu(1).model_dump(mode="json")
    own_s = Hardware.model_validate(document).devices[0].link_latency_s
    rows = [{"document": document, "network": None}] * 2
    timed = {"bandwidth": 2e9, "latency_s": 3e-4, "message_shares": {"64kB": 0.5, "1MB": 1.0}}
    found = combine(rows, members, timed).network
    assert found is not None and found.bandwidth == 2e9
    assert found.latency_s == pytest.approx(3e-4 - 2 * own_s)
    assert combine(rows, members, {**timed, "latency_s": own_s}).network.latency_s == 1e-6  # type: ignore[union-attr]
