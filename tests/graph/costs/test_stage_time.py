"""Seconds of stages and messages, and the bytes that stay: what a plan is made with is what its programs count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph.costs.stage_time import MessageTimes, roofline, stage_seconds
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import PRECISIONS
from penstock.passes.draft import Lasting, Options
from penstock.tests.ir.program.two_stages import interface_of, models

MACHINE = Hardware.cpu(num_devices=2, link="1GB/s")
SPEC = replace(interface_of(*models()).stages["stage1"], forward_flops=1e9, backward_flops=2e9, launches=5)


def test_a_stage_takes_what_was_measured_else_what_the_roofline_says() -> None:
    here, there = MACHINE.devices
    measured = replace(SPEC, seconds=((here.name, 0.1, 0.2, 0.3),))
    assert stage_seconds(measured, here, "fp32") == TurnSeconds(0.1, 0.2, 0.3)
    found = stage_seconds(measured, there, "fp32")
    assert found == roofline(SPEC, there, "fp32")
    assert found.forward_s == found.rematerialise_s == there.compute_s(1e9, SPEC.forward_traffic_bytes, "fp32", 5)
    assert found.long_backward_s == found.both_s == found.forward_s + found.backward_s
    assert stage_seconds(SPEC, here, "fp32", has_backward=False) == replace(found, backward_s=0.0)


def test_messages_take_their_latency_and_their_bytes() -> None:
    messages, latency_s = MessageTimes(MACHINE), MACHINE.latency_s("cpu0", "cpu1")
    assert messages.seconds(0, 1, 1000, count=2) == 2 * latency_s + 1000 / MACHINE.bandwidth("cpu0", "cpu1")
    assert messages.way(0, 1) == messages.way(1, 0)
    assert messages.seconds(1, 1, 1000) == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plans_and_programs_count_the_same_parts(precision: str) -> None:
    options, has_masters = Options(precision=precision, state_bytes_per_param=8.0), PRECISIONS[precision].has_masters
    interface = replace(interface_of(*models()), state_bytes_per_param=8.0, master=has_masters)
    masters, states = interface.master_bytes(SPEC), interface.state_bytes(SPEC)
    assert options.lasting(SPEC.weight_bytes, SPEC.params) == Lasting(SPEC.weight_bytes, masters, states)
    assert options.optimizer_bytes_per_param * SPEC.trained_params == interface.optimizer_bytes(SPEC)
