"""Figures of a timeline, and its trace as Perfetto reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.simulate import Span, Timeline, simulate
from penstock.tests.ir.program.handmade import pipeline

SPANS = [
    Span(0, "compute", "forward", "y = rt.forward()", 100.0, 103.0),
    Span(0, "h2d", "fetch", "w = rt.fetch()", 100.0, 101.0),
    Span(1, "compute", "forward", "z = rt.forward()", 103.5, 104.0),
    Span(0, "compute", "backward", "g = rt.backward()", 103.0, 104.0),
]


def test_measured_spans_start_at_zero_and_give_busy_shares() -> None:
    timeline = Timeline.from_spans(SPANS, ["gpu0", "gpu1"], peak_bytes={"gpu0": 2**20})
    assert timeline.step_s == 4.0
    assert min(span.start_s for span in timeline.spans) == 0.0
    assert timeline.busy_share == {(0, "compute"): 1.0, (0, "h2d"): 0.25, (1, "compute"): 0.125}
    assert timeline.bottleneck() == ("gpu0 compute", 1.0)
    assert "gpu0: peak 1.00 MiB" in timeline.describe() and "gpu0 compute 100%" in timeline.describe()


def test_a_link_can_be_the_bottleneck() -> None:
    timeline = Timeline.from_spans(SPANS[1:3], ["gpu0", "gpu1"], link_busy={"rc0.0.down": 0.9, "gpu0.up": 0.1})
    assert timeline.bottleneck() == ("rc0.0.down", 0.9)


def test_an_empty_timeline() -> None:
    timeline = Timeline.from_spans([], ["gpu0"])
    assert (timeline.step_s, timeline.busy_share, timeline.bottleneck()) == (0.0, {}, ("nothing", 0.0))


def test_the_trace_has_what_perfetto_needs(tmp_path: Path) -> None:
    hardware = Hardware.cpu(2)
    timeline = simulate(pipeline(2, 4, 2), hardware)
    timeline.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "cpu0", 1: "cpu1", 2: "hosts"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == len(timeline.spans)
    for bar, span in zip(bars, timeline.spans):
        assert threads[bar["pid"], bar["tid"]] == span.stream and processes[bar["pid"]] == f"cpu{span.device}"
        assert bar["name"] == span.op and bar["args"]["text"] == span.text
        assert bar["ts"] == pytest.approx(span.start_s * 1e6) and bar["dur"] >= 0.0
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(timeline.step_s * 1e6)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"cpu0 bytes", "cpu1 bytes", "dram0 bytes"}
    for event in events:
        assert isinstance(event["pid"], int) and (event["ph"] == "M" or event["ts"] >= 0)
