"""A pipeline of passes: read from text, written as text, and run."""

from __future__ import annotations

import dataclasses
import difflib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import ops
from ..ir.errors import PassError
from ..ir.program import profile_memory
from ..ir.verify import verify
from ..passes.base import Pass, check_contracts
from ..passes.draft import Draft
from ..passes.receive_earlier import simulated_s
from ..passes.table import PASSES
from .strategies import STRATEGIES

ONE_PASS = re.compile(r"\s*([\w-]+)\s*(?:\{([^{}]*)\})?\s*")
OF_DEVICES = re.compile(r"(?:(\d+)\*)?devices")
BETWEEN_PASSES = re.compile(r",(?![^{]*\})")  # a comma that is not inside braces


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass: its seconds, the ops it added, and the programs' simulated step and peak after it."""

    name: str
    took_s: float
    ops_added: int
    step_s: float | None
    peak_bytes: int | None


def parse_pipeline(text: str, num_devices: int) -> tuple[Pass, ...]:
    """Passes of a strategy's name or of a line such as "coarsen, partition-balanced{stages=4}, ...".

    `devices` as an option's value is the number of devices, `2*devices` twice that. Raises `PassError` with close
    names.
    """
    line = STRATEGIES.get(text, text)
    if "," not in line and line not in PASSES:
        close = difflib.get_close_matches(line, [*STRATEGIES, *PASSES], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise PassError(f"strategy={text!r} is neither a strategy ({', '.join(STRATEGIES)}, auto) nor a pipeline{hint}")
    passes: list[Pass] = []
    for part in BETWEEN_PASSES.split(line):
        found = ONE_PASS.fullmatch(part)
        if found is None:
            raise PassError(f'strategy={text!r}: {part.strip()!r} is no pass, such as "partition-balanced{{stages=4}}"')
        passes.append(_make(found[1], found[2] or "", num_devices))
    check_contracts(passes)
    return tuple(passes)


def require_complete(passes: Sequence[Pass]) -> None:
    """Raise `PassError` where a decision that every job needs is left open."""
    decided = {name for p in passes for name in p.fields()}
    makers: dict[str, list[str]] = defaultdict(list)
    for kind in PASSES.values():
        if kind.decides[0].is_required:
            makers[kind.decides[0].name].append(kind.name)
    missing = [" or ".join(names) for decision, names in makers.items() if decision not in decided]
    if missing:
        raise PassError(f"strategy {pipeline_text(passes)!r} lacks {', '.join(missing)}; put it after the others")


def _make(name: str, options: str, num_devices: int) -> Pass:
    if name not in PASSES:
        close = difflib.get_close_matches(name, PASSES, n=3)
        raise PassError(
            f"no pass {name!r}; {'did you mean ' + ' or '.join(close) if close else 'there are ' + ', '.join(PASSES)}"
        )
    kind = PASSES[name]
    known = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in options.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise PassError(f"pass {name!r} has no option {key!r}; it has {', '.join(known) or 'none'}")
        values[key] = _value(name, key, value, type(known[key].default), num_devices)
    return kind(**values)


def _value(name: str, key: str, value: str, kind: type, num_devices: int) -> Any:
    if value == "auto" and key in PASSES[name].automatic:
        return 0
    of_devices = OF_DEVICES.fullmatch(value)
    if of_devices is not None and kind is int:
        return int(of_devices[1] or 1) * num_devices
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError) as error:
        raise PassError(f"pass {name!r}: option {key}={value!r} is not {kind.__name__}") from error


def pipeline_text(passes: Sequence[Pass], short: bool = False) -> str:
    """The passes as text that `parse_pipeline` reads back. `short`: floats have six digits at most."""
    return ", ".join(p.text(short) for p in passes)


def run_passes(
    draft: Draft,
    passes: Sequence[Pass],
    decided: Mapping[str, Any] | None = None,
    *,
    dump: Callable[[str, Draft], None] | None = None,
    record: bool = False,
    check: bool = True,
    rewrite: Callable[[Pass, Draft, Any], None] | None = None,
) -> tuple[dict[str, Any], list[PassRecord]]:
    """Run all passes on the draft. Where `decided` has a pass's decision, it is applied instead of planning anew.

    After each pass `dump(pass name, draft)` is called, `record` simulates, and `check` verifies the programs without
    their memory, since the programs need not fit before the last pass. `rewrite` does what each pass's own does.
    Returns decisions and records.
    """
    decisions: dict[str, Any] = {}
    records = []
    draft.promised = frozenset(given for p in passes for given in p.gives)
    for p in passes:
        begin_s, before = time.perf_counter(), _num_ops(draft)
        decision = p.gather(decided)
        if decision is None:
            decision = p.plan(draft)
        if rewrite is None:
            p.rewrite(draft, decision)
        else:
            rewrite(p, draft, decision)
        decisions.update(p.split(decision))
        took_s = time.perf_counter() - begin_s
        if draft.programs and check:
            verify(draft.programs, draft.lane_hardware, memory=False)
        step_s = simulated_s(draft, draft.programs) if record and draft.programs else None
        peak = max((profile_memory(q).peak_bytes[ops.DEVICE] for q in draft.programs), default=None) if record else None
        records.append(PassRecord(p.name, took_s, _num_ops(draft) - before, step_s, peak))
        if dump is not None:
            dump(p.name, draft)
    return decisions, records


def _num_ops(draft: Draft) -> int:
    return sum(1 for program in draft.programs for _ in program.ops())
