"""The lines on failures in a plan's answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.compiler.plan import Plan, Prediction
from penstock.compiler.report.failures import checkpoint_bytes, failure_report, failure_text, with_failures
from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Interface
from penstock.tests.ir.program.test_lanes import make_draft
from penstock.tests.runtime.simulate.test_symmetry import put_in_racks


def plan_for(hardware: Hardware) -> tuple[Any, Interface]:
    """A plan with a step of 10 s, and the interface of two replicas of a group of four hosts."""
    draft = make_draft(16, 1, hardware, micro_batches=32)
    predicted = Prediction.model_construct(step_s=10.0)
    return Plan.model_construct(predicted=predicted), draft.programs[0].interface


def test_a_copy_is_saved_by_all_its_hosts() -> None:
    hardware = with_failures(put_in_racks(8, 4), "1000h", "1GB/s")
    plan, interface = plan_for(hardware)
    report = failure_report(plan, interface, hardware)
    assert report is not None
    assert report.run.mtbf_s == pytest.approx(1000 * 3600 / 32)
    num_bytes = checkpoint_bytes(interface)
    trained = sum(p.numel for spec in interface.stages.values() for p in spec.params)
    assert num_bytes == pytest.approx(trained * (4 + interface.state_bytes_per_param))
    assert report.run.write_s == pytest.approx(num_bytes / 1e9) and report.run.restart_s == 300 + report.run.write_s
    assert report.run.stall_s == pytest.approx(num_bytes / 4 / 10e9)  # over the network, a fourth to each host
    assert report.useful_share == pytest.approx(report.shares.useful, rel=0.01)
    text = failure_text(report)
    assert re.match(r"one in 31\.. hours; best is a save after every step \(10\.0 s\) of 1\.", text)
    assert f"{1 - report.useful_share:.1%} of the time is lost" in text


def test_without_storage_hosts_write_to_their_own_disks() -> None:
    hardware = with_failures(put_in_racks(8, 4), "1000h", None)
    report = failure_report(*plan_for(hardware), hardware)
    assert report is not None
    assert report.run.write_s == pytest.approx(report.checkpoint_bytes / 4 / 2e9)  # two disks of 1 GB/s
    shared = hardware.with_(ssd_shares={1: 1, 2: 0.75})
    found = failure_report(*plan_for(shared), shared)
    assert found is not None and found.run.write_s == pytest.approx(report.run.write_s / 0.75)
    narrow = hardware.with_(ssd_uplink_bandwidth="500MB/s")
    found = failure_report(*plan_for(narrow), narrow)
    assert found is not None and found.run.write_s == pytest.approx(4 * report.run.write_s)
    bare = hardware.with_(ssds=0)
    with pytest.raises(HardwareError, match=r"failures.storage_bandwidth: missing, .* such as --storage 100GB/s"):
        failure_report(*plan_for(bare), bare)


def test_a_rate_that_is_missing_is_asked_for_before_the_plan() -> None:
    bare = put_in_racks(8, 4).with_(ssds=0)
    for hardware, mtbf in ((bare, "1000h"), (bare.with_(failures={"device_mtbf_s": "1000h"}), None)):
        with pytest.raises(HardwareError, match="such as --storage 100GB/s"):
            with_failures(hardware, mtbf, None)
        assert with_failures(hardware, "1000h", "1GB/s").failures


def test_parts_travel_at_what_the_network_reaches() -> None:
    hardware = with_failures(put_in_racks(8, 4), "1000h", "1GB/s")
    assert hardware.network is not None
    network = hardware.network.model_dump(exclude_defaults=True) | {"host_shares": {2: 1, 4: 0.5}}
    whole, half = (failure_report(*plan_for(h), h) for h in (hardware, hardware.with_(network=network)))
    assert whole is not None and half is not None and half.run.stall_s == pytest.approx(2 * whole.run.stall_s)


def test_what_is_said_of_failures() -> None:
    hardware = put_in_racks(8, 4)
    assert with_failures(hardware, None, None) is hardware
    assert failure_report(*plan_for(hardware), hardware) is None
    said = hardware.with_(failures={"host_mtbf_s": "100d", "restart_s": "10min"})
    assert said.failures is not None and said.failures.mtbf_s(32, 8) == 100 * 86400 / 8
    both = with_failures(said, "200d", "5GB/s").failures
    assert both is not None and both.restart_s == 600 and both.mtbf_s(32, 8) == pytest.approx(200 * 86400 / 48)
    assert "a failure in 300.0 hours (12.5 days), 10 minutes to go on after one" in said.describe()
    with pytest.raises(HardwareError, match="give --mtbf, too"):
        with_failures(hardware, None, "5GB/s")
    with pytest.raises(HardwareError, match=r"failures.*device_mtbf_s or host_mtbf_s, or both; this has neither"):
        hardware.with_(failures={"restart_s": 1})
    with pytest.raises(HardwareError, match="unknown unit 'years'"):
        with_failures(hardware, "5years", None)
