"""The timeline of a step, simulated or measured: spans per stream, bytes per link, peaks per memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...ir.ops import STREAMS
from ...ir.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one stream of a device, in seconds since the step began. A transfer's span has no waiting in it."""

    device: int
    stream: str
    op: str
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of all devices.

    `peak_bytes` has for each memory ("gpu0", "dram0") the most bytes that the programs hold in issue order; a host's
    DRAM is the sum over its devices. `moved_bytes` and `link_busy` (share of the step at full rate) are per link.
    `memory` has for each memory its bytes over time, as rows (seconds, bytes). `steady_s` is the time between the ends
    of two steps, one right after another, None where only this step is known.
    """

    spans: Sequence[Span]
    device_names: Sequence[str]
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    link_busy: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    steady_s: float | None = None

    @classmethod
    def from_spans(cls, spans: Iterable[Span], device_names: Sequence[str], **figures: Any) -> Timeline:
        """A timeline of measured spans on any one clock: the earliest start becomes second 0."""
        rows = list(spans)
        begin_s = min((span.start_s for span in rows), default=0.0)
        moved = [Span(s.device, s.stream, s.op, s.text, s.start_s - begin_s, s.end_s - begin_s) for s in rows]
        return cls(moved, device_names, **figures)

    @property
    def step_s(self) -> float:
        """Seconds of one step among many; `from_rest_s` where only this step is known."""
        return self.from_rest_s if self.steady_s is None else self.steady_s

    @cached_property
    def from_rest_s(self) -> float:
        """Seconds until the last op ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def busy_share(self) -> dict[tuple[int, str], float]:
        """Share of the step that each (device, stream) is occupied."""
        busy_s: dict[tuple[int, str], float] = {}
        for span in self.spans:
            key = (span.device, span.stream)
            busy_s[key] = busy_s.get(key, 0.0) + span.end_s - span.start_s
        return {key: value / self.step_s if self.step_s else 0.0 for key, value in sorted(busy_s.items())}

    def bottleneck(self) -> tuple[str, float]:
        """The busiest stream ("gpu0 compute") or link ("rc0.0.down") and its busy share.

        A tie goes to the link, which says more about what would help than the streams that wait for it.
        """
        shares = dict(self.link_busy)
        names = self.device_names
        shares |= {f"{names[device]} {stream}": share for (device, stream), share in self.busy_share.items()}
        if not shares:
            return "nothing", 0.0
        name = max(shares, key=lambda name: round(shares[name], 4))  # the first of equals
        return name, shares[name]

    def describe(self) -> str:
        """A few lines of text for people."""
        name, share = self.bottleneck()
        step, from_rest = format_seconds(self.step_s), format_seconds(self.from_rest_s)
        lines = [f"step {step}{'' if step == from_rest else f' ({from_rest} from rest)'}, busiest: {name} {share:.0%}"]
        lines += [f"  {memory}: peak {format_bytes(peak)}" for memory, peak in self.peak_bytes.items()]
        lines += [f"  {link}: {format_bytes(moved)}" for link, moved in self.moved_bytes.items() if moved]
        return "\n".join(lines)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write JSON that Perfetto and chrome://tracing open: a process per device, a thread per stream, counters of
        memory; times in microseconds."""
        events = _names(self.device_names) + [_span_event(span) for span in self.spans]
        for memory, rows in self.memory.items():
            pid = self.device_names.index(memory) if memory in self.device_names else len(self.device_names)
            events += [
                {"ph": "C", "name": f"{memory} bytes", "pid": pid, "ts": at_s * 1e6, "args": {"bytes": taken}}
                for at_s, taken in rows
            ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(device_names: Sequence[str]) -> list[dict[str, Any]]:
    """Events that name processes and threads; the one process beyond the devices holds the hosts' counters."""
    events: list[dict[str, Any]] = []
    for pid, name in enumerate([*device_names, "hosts"]):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for pid in range(len(device_names)):
        for tid, stream in enumerate(STREAMS):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}})
    return events


def _span_event(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.op,
        "cat": span.stream,
        "pid": span.device,
        "tid": STREAMS.index(span.stream),
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"text": span.text},
    }
