"""The contents of each memory over time: values from the op that makes them to the last that reads them, the workspace
of the op that runs, and what lasts, arenas included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ....ir import ops
from ....ir.calls import op_of
from ....ir.machine.hardware import Hardware
from ....ir.program import Program, donated_operands, persistent_bytes, places_of, values_of, work_of
from ....ir.program.memory import plan_arenas
from ....runtime.simulate import Span, Timeline
from ...plan import Prediction


def memories(
    timeline: Timeline,
    rows: Sequence[tuple[Span, int]],
    programs: Sequence[Program],
    roles: Sequence[int],
    hardware: Hardware,
    predicted: Prediction | None,
    unit_s: float,
) -> list[dict[str, Any]]:
    """For each memory its bytes over time, its budget, what lasts, and the values with their time there."""
    values = _values(rows, programs, roles, timeline, hardware)
    lasting = _lasting(programs, roles, hardware)
    found = []
    for name, points in timeline.memory.items():
        budget = None if predicted is None else predicted.budget_bytes.get(name)
        found.append(
            {
                "name": name,
                "budget": budget,
                "points": [[round(s / unit_s), num] for s, num in points],
                "lasting": lasting.get(name, {}),
                "values": [
                    [text, num, round(begin / unit_s), round(end / unit_s)] for text, num, begin, end in values[name]
                ]
                if name in values
                else [],
            }
        )
    return found


def _memory_name(hardware: Hardware, device: int, memory: str) -> str:
    return hardware.devices[device].name if memory == ops.DEVICE else f"{memory}{hardware.devices[device].host}"


def _values(
    rows: Sequence[tuple[Span, int]],
    programs: Sequence[Program],
    roles: Sequence[int],
    timeline: Timeline,
    hardware: Hardware,
) -> dict[str, list[tuple[str, int, float, float]]]:
    """Memory -> name, bytes, seconds from and to, of each value that an op owns there."""
    spans: dict[int, list[Span]] = {}
    for span, _ in rows:
        spans.setdefault(span.device, []).append(span)
    found: dict[str, list[tuple[str, int, float, float]]] = {}
    for device, own in spans.items():
        nodes = [node for node in programs[roles[device]].ops() if op_of(node).streams]
        span_of: dict[fx.Node, Span] = dict(zip(nodes, own))
        for node, span in span_of.items():
            work = work_of(programs[roles[device]], node)
            if work.workspace_bytes and not op_of(node).workspace_in_arena:
                name = _memory_name(hardware, device, work.workspace_memory)
                text = f"workspace of {op_of(node).name}, for {node.name}"
                found.setdefault(name, []).append((text, work.workspace_bytes, span.start_s, span.end_s))
            for value in values_of(node):
                kind = value.meta["type"]
                if kind.owned and kind.bytes:
                    users = [user for user in value.users if user in span_of]
                    ends = [
                        span_of[user].start_s if value in donated_operands(user) else span_of[user].end_s
                        for user in users
                    ]
                    end_s = max(ends, default=timeline.from_rest_s)
                    name = _memory_name(hardware, device, kind.memory)
                    text = f"{value.name} ({kind.kind}{', in the arena' if places_of(value) else ''})"
                    found.setdefault(name, []).append((text, kind.bytes, span.start_s, end_s))
    return found


def _lasting(programs: Sequence[Program], roles: Sequence[int], hardware: Hardware) -> dict[str, dict[str, int]]:
    """Memory -> what lasts from step to step -> bytes, over all devices that use it."""
    found: dict[str, dict[str, int]] = {}
    for device, role in enumerate(roles):
        persistent, arenas = persistent_bytes(programs[role]), plan_arenas(programs[role])
        for memory in ops.MEMORIES:
            into = found.setdefault(_memory_name(hardware, device, memory), {})
            for what, num in persistent.parts(memory).items():
                into[what] = into.get(what, 0) + num
            into["arena"] = into.get("arena", 0) + arenas[memory].bytes
    return found
