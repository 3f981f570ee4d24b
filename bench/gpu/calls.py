"""Chooses the part of the first hour that a call begins next, and its time limit. Standard library only.

The limits of one call's parts and its start add up to less than the call may take, and a part may take what the parts
before it left over, so that each part of the call is tried. Parts that failed in earlier calls come after them, where
time is left, then those of later calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.bench.gpu.ledger import Ledger, Part, State

TOTAL_S = 570.0  # of a call, of the 600 that a machine grants
START_S = 30.0  # of those, for unpacking wheels and looking at the machine
NUM_CALLS = 6
States = Mapping[str, State]


def states_of(parts: Iterable[Part], ledger: Ledger) -> dict[str, State]:
    return {part.name: ledger.state(part) for part in parts}


def current_call(parts: Sequence[Part], states: States) -> int:
    """The first call that has a part which neither ended well nor failed; the last call if none has."""
    return min((part.call for part in parts if _is_open(part, states) and states[part.name].fresh), default=NUM_CALLS)


def next_part(
    parts: Sequence[Part], states: States, call: int, left_s: float, begun: Collection[str], scale: float = 1.0
) -> tuple[Part, float] | None:
    """The part to begin and its limit; None if nothing is left to do, or only what `left_s` are too few for. `begun`:
    names of what this call has tried already, as it tries nothing twice."""
    rest = [part for part in parts if _is_open(part, states) and part.name not in begun]
    own = [part for part in rest if part.call == call and states[part.name].fresh]
    if own:
        limit_s = scale * own[0].limit_s
        left_over_s = left_s - scale * sum(part.limit_s for part in own)
        if limit_s <= left_s:
            return own[0], limit_s + max(0.0, left_over_s)
        return None if begun else (own[0], left_s)
    failed = sorted((part for part in rest if not states[part.name].fresh), key=lambda part: states[part.name].failed)
    later = [part for part in rest if part.call > call and states[part.name].fresh]
    fitting = (part for part in (*failed, *later) if scale * part.limit_s <= left_s)
    return next(((part, scale * part.limit_s) for part in fitting), None)


def _is_open(part: Part, states: States) -> bool:
    return not states[part.name].done and states[part.name].begun < part.tries


def report(parts: Iterable[Part], states: States) -> dict[str, object]:
    """The parts that are done, those that failed and why, and those that are left."""
    named = {part.name: states[part.name] for part in parts}
    return {
        "done": [name for name, state in named.items() if state.done],
        "failed": {name: state.reason for name, state in named.items() if not state.done and state.begun},
        "left": [name for name, state in named.items() if not state.begun],
    }
