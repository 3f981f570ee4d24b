"""Rows of the page's timeline: when which line of which program occupied which stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ....ir import ops
from ....ir.calls import op_of
from ....ir.program import Program, producer_of, work_of
from ....ir.program.text import print_node
from ....runtime.simulate import Span, Timeline
from .kinds import kind_of

ORDER = (ops.COMPUTE, ops.H2D, ops.D2H, ops.CPU)  # of a device's streams in the picture; others follow by name
PRECISE = 10**7  # parts of a step in which times are given


class CodeLines:
    """The lines of all roles' programs, numbered through: `number` of an op's line, and `text` of each role's step."""

    def __init__(self, programs: Sequence[Program], files: Mapping[int, str]):
        self.number: dict[fx.Node, int] = {}
        self.roles: list[dict[str, Any]] = []  # role -> its first line, and the lines
        first = 0
        for program, file in zip(programs, files.values()):
            lines = _step_of(file)
            self._find(program, lines, first)
            self.roles.append({"first": first, "lines": [_narrow(line) for line in lines]})
            first += len(lines)

    def _find(self, program: Program, lines: Sequence[str], first: int) -> None:
        """Find the lines of ops: they follow each other in the program's order, with comments between."""
        at = 0
        for node in program.ops():
            text = print_node(node)
            if text is None:
                continue
            at = next(i for i in range(at, len(lines)) if lines[i].strip().startswith(text))
            self.number[node] = first + at
            at += 1

    def ops(self) -> dict[int, list[str]]:
        """For each line of an op that occupies a stream the op's name and its kind."""
        return {line: [op_of(node).name, kind_of(node)] for node, line in self.number.items() if op_of(node).streams}

    def producers(self, programs: Sequence[Program]) -> dict[int, list[int]]:
        """For each line the lines whose values it reads; for a receive, the line that sends."""
        found: dict[int, list[int]] = {}
        sent = {
            (program.device, work.peer, work.tag): self.number[node]
            for program in programs
            for node in program.ops()
            if node.target is ops.send and (work := work_of(program, node))
        }
        for program in programs:
            for node in program.ops():
                if node not in self.number or not op_of(node).streams:
                    continue
                made = [producer_of(value) for value in node.all_input_nodes]
                before = {self.number[each] for each in made if each in self.number and op_of(each).streams}
                if node.target is ops.recv:
                    work = work_of(program, node)
                    before |= {sent[key] for key in [(work.peer, program.device, work.tag)] if key in sent}
                if before:
                    found[self.number[node]] = sorted(before)
        return found


def streams_of(rows: Sequence[tuple[Span, int]]) -> list[tuple[int, str]]:
    """The streams of these spans, device by device."""
    place = {stream: number for number, stream in enumerate(ORDER)}
    found = {(span.device, span.stream) for span, _ in rows}
    return sorted(found, key=lambda key: (key[0], place.get(key[1], len(ORDER)), key[1]))


def _step_of(file: str) -> list[str]:
    """The lines of the function `step`."""
    lines = file.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def step("))
    last = next((i for i in range(first + 1, len(lines)) if lines[i].startswith(("def ", "class "))), len(lines))
    return "\n".join(lines[first:last]).rstrip().splitlines()


def _narrow(line: str) -> str:
    """The line, with its comment next to it."""
    code, mark, comment = line.partition("  #")
    return f"{code.rstrip()}{mark}{comment}" if code.strip() else line


def predicted_rows(
    timeline: Timeline, programs: Sequence[Program], roles: Sequence[int], lines: CodeLines
) -> list[tuple[Span, int]]:
    """Each span of a simulation with its line. A device's spans are in the order of its role's text."""
    by_device: dict[int, list[Span]] = {}
    for span in timeline.spans:
        by_device.setdefault(span.device, []).append(span)
    found = []
    for device, spans in by_device.items():
        nodes = [node for node in programs[roles[device]].ops() if op_of(node).streams]
        assert len(nodes) == len(spans), "a span for each op that occupies a stream"
        found += [(span, lines.number[node]) for span, node in zip(spans, nodes)]
    return found


def measured_rows(timeline: Timeline, predicted: Sequence[tuple[Span, int]]) -> list[tuple[Span, int]]:
    """Each span of a measurement with the line of the device's op of the same text, in which groups of a lane have
    names of their own."""
    line_of = {(span.device, span.text): line for span, line in predicted}
    return [
        (span, line) for span in timeline.spans if (line := line_of.get((span.device, span.text))) is not None
    ]


def columns(rows: Sequence[tuple[Span, int]], streams: Mapping[tuple[int, str], int], unit_s: float) -> dict[str, Any]:
    """The spans as columns of whole numbers: stream, start and length in units, line."""
    return {
        "stream": [streams[span.device, span.stream] for span, _ in rows],
        "start": [round(span.start_s / unit_s) for span, _ in rows],
        "length": [max(1, round((span.end_s - span.start_s) / unit_s)) for span, _ in rows],
        "line": [line for _, line in rows],
    }
