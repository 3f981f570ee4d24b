"""The devices that delayed a step: their ops took longer than on equal devices, or than the plan predicts.

Equal devices of the same role do the same work, if their lanes have equally many micro-batches, so each is compared
with the others. A device that has no equal is compared with the plan's prediction, scaled by the other devices' ratio
to theirs: so a machine that is slower than its document as a whole has no stragglers. The cost of the delay is found by
replaying the step's order of ops with the expected durations. Only ops that a device does by itself count, as receives
and collectives wait for others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import median_low

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import Interface, Order, Program, bind, build_order, place_of, print_node
from ...ir.verify.case import Case
from .engine import simulate
from .timeline import Span, Timeline

LEAST_RATIO = 1.25  # of the time expected; smaller ratios are the usual scatter of times
LEAST_SHARE = 0.02  # of the step, by which a straggler must have delayed it
Key = tuple[str, str]  # stream, op
SecondsByKey = dict[int, dict[Key, list[tuple[str, float]]]]  # device -> key -> (text, seconds) in issue order


@dataclass(frozen=True)
class Straggler:
    """A stream of a device that took `ratio` times as long as expected. `op` and `stage` lost the most time.

    `held_up` is the share of the step by which the stream delayed it. `by_equals`: the device was compared with devices
    of the same role, not with the plan.
    """

    device: int
    name: str
    stream: str
    op: str
    stage: str
    ratio: float
    seconds: float
    expected_s: float
    held_up: float
    by_equals: bool

    def __str__(self) -> str:
        than = "the time of its equals" if self.by_equals else "what the plan expects of it beside the others"
        where = f"{self.op} of {self.stage}" if self.stage else self.op
        stream = "" if self.stream == ops.COMPUTE else f" ({self.stream})"
        return (
            f"{self.name} took {self.ratio:.1f}x {than} in {where}{stream}; it held up the step by {self.held_up:.0%}"
        )


def find_stragglers(
    measured: Timeline,
    programs: Sequence[Program],
    hardware: Hardware,
    *,
    precision: str = "fp32",
    least_ratio: float = LEAST_RATIO,
) -> list[Straggler]:
    """The stragglers of one measured step, the costliest first. `programs` are those of a lane or of all devices."""
    predicted = durations(simulate(programs, hardware, precision=precision).spans)
    return _stragglers(measured, predicted, programs, hardware, least_ratio)


def _stragglers(
    measured: Timeline,
    predicted: SecondsByKey,
    programs: Sequence[Program],
    hardware: Hardware,
    least_ratio: float = LEAST_RATIO,
) -> list[Straggler]:
    interface, bound = programs[0].interface, bind(programs)
    found = durations(measured.spans)
    roles = {device: place_of(interface, device)[1] for device in found}
    if set(predicted) != set(found):  # one lane was simulated in place of all
        predicted = {device: predicted[role] for device, role in roles.items()}
    work = {device: _work_of(interface, hardware, device) for device in found}
    equals = {d: [other for other in found if work[other] == work[d]] for d in found}
    expected = {device: _expected_seconds(device, equals[device], found, predicted) for device in found}
    replay = _Replay(bound, hardware, found)
    rows = []
    for device in found:
        for stream in sorted({stream for stream, _ in expected[device]}):
            row = _straggler(device, stream, found, expected, len(equals[device]) > 1, replay, measured)
            if row is not None and row.ratio >= least_ratio and row.held_up >= LEAST_SHARE:
                rows.append(row)
    return sorted(rows, key=lambda row: -row.held_up)


def slow_devices(
    steps: Sequence[Timeline], programs: Sequence[Program], hardware: Hardware, *, precision: str = "fp32"
) -> dict[int, float]:
    """The devices that held up steps by their computation, each with its ratio, the median over the steps: in a step
    that it did not hold up, a device counts as one that takes the time expected."""
    predicted = durations(simulate(programs, hardware, precision=precision).spans)
    found = [_stragglers(step, predicted, programs, hardware) for step in steps]
    rows = [{row.device: row.ratio for row in each if row.stream == ops.COMPUTE} for each in found]
    medians = {d: median_low(row.get(d, 1.0) for row in rows) for d in sorted({d for row in rows for d in row})}
    return {device: ratio for device, ratio in medians.items() if ratio >= LEAST_RATIO}


def _work_of(interface: Interface, hardware: Hardware, device: int) -> tuple[int, int, int]:
    """Equal for devices of which the same is expected: their role, the number of their micro-batches, their kind."""
    lane, role = place_of(interface, device)
    return role, interface.micro_batches_of(lane), hardware.device_kinds[device]


def durations(spans: Sequence[Span]) -> SecondsByKey:
    """For each device and (stream, op), the text and seconds of each op, in issue order."""
    found: SecondsByKey = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        rows = found.setdefault(span.device, {}).setdefault((span.stream, span.op), [])
        rows.append((span.text, span.end_s - span.start_s))
    return found


def _expected_seconds(
    device: int, equals: Sequence[int], found: SecondsByKey, predicted: SecondsByKey
) -> dict[Key, list[float]]:
    """The expected seconds of each op that the device does by itself."""
    keys = [key for key in found[device] if _is_alone(ops.ALL[key[1]])]
    if len(equals) > 1:
        return {key: _usual([found[other].get(key, []) for other in equals]) for key in keys}
    scale = {key: _scale(key, found, predicted) for key in keys}
    return {
        key: [scale[key] * seconds for _, seconds in predicted[device].get(key, [])]
        for key in keys
        if len(predicted[device].get(key, [])) == len(found[device][key])
    }


def _is_alone(op: ops.Op) -> bool:
    """Whether a device does this op by itself, without waiting for other devices or its host."""
    return bool(op.streams) and ops.HOST not in op.streams and not op.meets


def _usual(rows: Sequence[Sequence[tuple[str, float]]]) -> list[float]:
    """For each op the median of the devices' seconds; the faster of two."""
    return [median_low(seconds for _, seconds in each) for each in zip(*rows)]


def _scale(key: Key, found: SecondsByKey, predicted: SecondsByKey) -> float:
    """The ratio of measured to predicted seconds for ops of this kind: the devices' median, the lower of two. Whole
    backwards and their halves are one kind, since perhaps one device alone runs whole ones."""
    ratios = []
    for device, rows in found.items():
        planned, took = (_seconds_alike(key, of) for of in (predicted[device], rows))
        if took > 0 and planned > 0:
            ratios.append(took / planned)
    return median_low(ratios) if ratios else 0.0


def _seconds_alike(key: Key, rows: Mapping[Key, Sequence[tuple[str, float]]]) -> float:
    """The seconds of a device's ops of a kind."""
    is_backward = ops.ALL[key[1]].is_backward
    alike = [other for other in rows if other == key or (is_backward and ops.ALL[other[1]].is_backward)]
    return sum(seconds for other in alike for _, seconds in rows[other])


def _straggler(
    device: int,
    stream: str,
    found: SecondsByKey,
    expected: Mapping[int, Mapping[Key, Sequence[float]]],
    by_equals: bool,
    replay: _Replay,
    measured: Timeline,
) -> Straggler | None:
    lost: dict[Key, float] = {}
    rows = {key: wanted for key, wanted in expected[device].items() if key[0] == stream and sum(wanted) > 0}
    for key, wanted in rows.items():
        for (text, seconds), usual_s in zip(found[device][key], wanted):
            place = key[1], _stage_of(text)
            lost[place] = lost.get(place, 0.0) + seconds - usual_s
    if not lost:
        return None
    took_s = sum(seconds for key in rows for _, seconds in found[device][key])
    expected_s = sum(sum(wanted) for wanted in rows.values())
    op, stage = max(lost, key=lambda place: lost[place])
    quicker = {(device, key): wanted for key, wanted in rows.items()}
    return Straggler(
        device,
        measured.device_names[device],
        stream,
        op,
        stage,
        took_s / expected_s,
        took_s,
        expected_s,
        1 - replay.seconds(quicker) / replay.whole_s if took_s > expected_s and replay.whole_s else 0.0,
        by_equals,
    )


def _stage_of(text: str) -> str:
    """The stage that an op's text names first: stage1 for `rt.fetch("stage1.weights")`."""
    named = re.search(r'"([^".]+)', text)
    return named.group(1) if named else ""


class _Replay:
    """A step's order of ops, to replay with any durations. `whole_s` is the step's length with the measured ones."""

    def __init__(self, bound: Sequence[Program], hardware: Hardware, found: SecondsByKey):
        self.order: Order = build_order(bound, Case(bound, hardware).memories)
        self.place: dict[fx.Node, tuple[int, Key, int]] = {}
        for program in bound:
            for node, key, number in _number_ops(program, self.order):
                self.place[node] = program.device, key, number
        self.found = found
        waits = {index: [other for other, _ in task.waits] for index, task in enumerate(self.order.tasks)}
        self.ranks = list(TopologicalSorter(waits).static_order())
        self.whole_s = self.seconds({})

    def seconds(self, instead: Mapping[tuple[int, Key], Sequence[float]]) -> float:
        """The step's length in seconds, with the durations of `instead` in place of the measured ones."""
        ends = [0.0] * len(self.order.tasks)
        for index in self.ranks:
            task = self.order.tasks[index]
            begin_s = max((ends[other] for other, _ in task.waits), default=0.0)
            ends[index] = begin_s + min(self._duration(node, instead) for _, node, _ in task.parts)
        return max(ends, default=0.0)

    def _duration(self, node: fx.Node, instead: Mapping[tuple[int, Key], Sequence[float]]) -> float:
        """Seconds of an op on one device. A message or collective takes what its shortest side does: others waited."""
        if node not in self.place:
            return 0.0
        device, key, number = self.place[node]
        if (device, key) in instead:
            return instead[device, key][number]
        rows = self.found.get(device, {}).get(key, [])
        return rows[number][1] if number < len(rows) else 0.0


def _number_ops(program: Program, order: Order) -> Iterator[tuple[fx.Node, Key, int]]:
    """Each op that takes time, with its (stream, name) and the number of ops of the same key before it."""
    counts: dict[Key, int] = {}
    for node in program.ops():
        op = op_of(node)
        if not op.streams or not print_node(node):
            continue
        key = order.work_of[node].stream, op.name
        counts[key] = counts.get(key, 0) + 1
        yield node, key, counts[key] - 1
