"""Runs of equal blocks as Python loops, so that 96 layers take no more lines than 4.

In: items of a stage with calls of blocks. Out: the same items, where every run of calls that feed each other in the
same way is one `Loop`. A round may hold several calls (layers that alternate between two kinds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..ir.names import is_index
from .paths import member
from .segments import BlockCall, CallOrNode, item_reads

MAX_PERIOD = 4


@dataclass(eq=False)
class Loop:
    """`rounds[r][j]` is the j-th call of round r. `carried` has pairs (value before the loop, value of the first round)
    that share a name, because each round reads what the round before made."""

    rounds: list[list[BlockCall]]
    indices: list[int]  # of the first call of each round; all -1 where every round calls the same module
    carried: list[tuple[fx.Node, fx.Node]]

    @property
    def range_text(self) -> str:
        first, step = self.indices[0], self.indices[1] - self.indices[0]
        if step == 0:
            return f"range({len(self.rounds)})"
        stop = self.indices[-1] + step
        if step == 1:
            return f"range({stop})" if first == 0 else f"range({first}, {stop})"
        return f"range({first}, {stop}, {step})"

    def member_text(self, call: BlockCall) -> str:
        """The text by which the loop's body reaches the module of a call of the first round: `self.h[i]`,
        `self.h[i + 1]`."""
        found = _index_of(self.rounds[0][0].path, self.rounds[1][0].path)
        if found is None:
            return member("self", "", call.path)
        position, index, _ = found
        parts = call.path.split(".")
        offset = int(parts[position]) - index
        text = member("self", "", ".".join(parts[:position])) if position else "self"
        text += f"[i + {offset}]" if offset > 0 else f"[i - {-offset}]" if offset else "[i]"
        rest = ".".join(parts[position + 1 :])
        return member(text, "", rest) if rest else text

    def reads(self) -> list[fx.Node]:
        """Values from before the loop that it reads."""
        inside = {n for calls in self.rounds for call in calls for n in call.outputs}
        return list(dict.fromkeys(n for calls in self.rounds for c in calls for n in c.inputs if n not in inside))

    def results(self) -> list[tuple[fx.Node, fx.Node]]:
        """(value of the last round, its twin of the first round)."""
        pairs = zip(self.rounds[-1], self.rounds[0])
        return [(last, first) for a, b in pairs for last, first in zip(a.outputs, b.outputs)]


def find_loops(
    items: Sequence[CallOrNode], key: Callable[[BlockCall], Any], outputs: Sequence[fx.Node]
) -> list[CallOrNode | Loop]:
    """Replace runs of calls with equal `key` by loops, from left to right, each time by the longest."""
    readers: dict[fx.Node, list[Any]] = {n: [None] for n in outputs}
    for item in items:
        for read in item_reads(item):
            readers.setdefault(read, []).append(item)
    found: list[CallOrNode | Loop] = []
    place = 0
    while place < len(items):
        best: Loop | None = None
        for period in range(1, MAX_PERIOD + 1):
            loop = _longest(items, place, period, key, readers)
            if loop is not None and (best is None or _size(loop) > _size(best)):
                best = loop
        found.append(items[place] if best is None else best)
        place += 1 if best is None else _size(best)
    return found


def _size(loop: Loop) -> int:
    return len(loop.rounds) * len(loop.rounds[0])


def _longest(
    items: Sequence[CallOrNode],
    place: int,
    period: int,
    key: Callable[[BlockCall], Any],
    readers: dict[fx.Node, list[Any]],
) -> Loop | None:
    first = _round(items, place, period)
    second = _round(items, place + period, period)
    if first is None or second is None or list(map(key, first)) != list(map(key, second)):
        return None
    roles = _roles(first, second)
    if roles is None:
        return None
    rounds, indices = [first], [_first_index(first[0], second[0])]
    step = _step(first, second)
    if step is None:
        return None
    after = second
    while after is not None and list(map(key, after)) == list(map(key, first)):
        alike = _step(rounds[-1], after) == step and _roles(rounds[-1], after) == roles
        if not (alike and _stays_inside(rounds[-1], after, readers)):
            break
        indices.append(indices[-1] + step)
        rounds.append(after)
        following = _round(items, place + period * len(rounds), period)
        if following is None:
            break
        after = following
    carried = _loop_values(first, roles)
    return Loop(rounds, indices, carried) if len(rounds) > 1 and carried is not None else None


def _round(items: Sequence[CallOrNode], place: int, period: int) -> list[BlockCall] | None:
    calls = [c for c in items[place : place + period] if isinstance(c, BlockCall)]
    return calls if len(calls) == period else None


Role = tuple[str, Any, int]  # ("same", node, 0) | ("inside", call, output) | ("carried", call, output)


def _roles(first: list[BlockCall], second: list[BlockCall]) -> list[list[Role]] | None:
    """The role of each operand of the second round: invariant, made in this round, or made in the round before."""
    before = {n: (j, q) for j, call in enumerate(first) for q, n in enumerate(call.outputs)}
    now = {n: (j, q) for j, call in enumerate(second) for q, n in enumerate(call.outputs)}
    roles: list[list[Role]] = []
    for j, (old, new) in enumerate(zip(first, second)):
        if len(old.inputs) != len(new.inputs) or len(old.outputs) != len(new.outputs):
            return None
        row: list[Role] = []
        for a, b in zip(old.inputs, new.inputs):
            if b in now and before.get(a) == now[b]:
                row.append(("inside", *now[b]))
            elif b in before and before[b][0] >= j:  # made after its use, so still there under the same name
                row.append(("carried", *before[b]))
            elif a is b and a not in before:
                row.append(("same", a, 0))
            else:
                return None
        roles.append(row)
    return roles


def _loop_values(first: list[BlockCall], roles: list[list[Role]]) -> list[tuple[fx.Node, fx.Node]] | None:
    pairs: dict[fx.Node, fx.Node] = {}
    for call, row in zip(first, roles):
        for start, (kind, maker, output) in zip(call.inputs, row):
            if kind == "carried":
                result = first[maker].outputs[output]
                if pairs.setdefault(start, result) is not result:
                    return None
    if len(set(pairs.values())) != len(pairs) or any(start.op == "get_attr" for start in pairs):
        return None
    invariant = {node for row in roles for kind, node, _ in row if kind == "same"}
    return None if invariant & set(pairs) else list(pairs.items())


def _stays_inside(calls: list[BlockCall], following: list[BlockCall], readers: dict[fx.Node, list[Any]]) -> bool:
    """Whether nothing but this round and the next one reads what the round makes."""
    allowed = {*calls, *following}
    return all(reader in allowed for call in calls for n in call.outputs for reader in readers.get(n, ()))


def _step(first: list[BlockCall], second: list[BlockCall]) -> int | None:
    """By how much the index in the paths grows from one round to the next; None unless it is one for all calls."""
    steps = set()
    places = set()
    for old, new in zip(first, second):
        if old.path == new.path:
            steps.add(0)
            continue
        found = _index_of(old.path, new.path)
        if found is None:
            return None
        places.add((found[0], tuple(old.path.split(".")[: found[0]])))
        steps.add(found[2])
    return steps.pop() if len(steps) == 1 and len(places) <= 1 else None


def _index_of(old: str, new: str) -> tuple[int, int, int] | None:
    """(position of the one part that differs, its number in `old`, by how much it grows)."""
    left, right = old.split("."), new.split(".")
    differing = [i for i, (a, b) in enumerate(zip(left, right)) if a != b]
    if len(left) != len(right) or len(differing) != 1:
        return None
    a, b = left[differing[0]], right[differing[0]]
    if not (is_index(a) and is_index(b)) or int(b) <= int(a):
        return None
    return differing[0], int(a), int(b) - int(a)


def _first_index(first: BlockCall, second: BlockCall) -> int:
    found = _index_of(first.path, second.path)
    return found[1] if found is not None else 0
