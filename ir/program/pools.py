"""The memory of a device by the streams that take it, for a GPU: what one stream has let go of, no other one can take.

torch's allocator keeps memory for each stream, a pool. A value is in the pool of the stream whose op made it, a value
that takes over another one in the pool of that. A value is given back to its pool when it is freed; one that the first
half of a backward has read, not before the other half is done, as autograd's graph may hold it until then.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import fx

from .. import ops
from ..calls import op_of
from ..machine.presets import gaps_bytes
from .memory import places_of, profile_memory, takes_place
from .program import Program, donated_operands, operands, values_of, work_of

_Bytes = dict[str, int]  # by pool


class PoolChange(NamedTuple):
    """The bytes that an op allocates in pools when it starts, and frees when it ends."""

    taken: _Bytes
    given: _Bytes


class Pools:
    """The change that each op of a typed program makes to the pools of device memory outside the arena; per pool, the
    peak of its bytes in text order (`peaks`), and all that is ever taken from it (`totals`)."""

    def __init__(self, program: Program):
        self.changes: dict[fx.Node, PoolChange] = {}
        self.peaks, self.totals = Counter[str](), Counter[str]()
        self._pool: dict[fx.Node, str] = {}
        self._rest: dict[fx.Node, fx.Node] = {}  # per value that a first half has read, the result that may hold it
        self._late: dict[fx.Node, _Bytes] = {}  # per such result, until it is used: what is freed, but not given back
        now = Counter[str]()
        for node in program.ops():
            change = self.changes[node] = self._change(node, work_of(program, node))
            for pool, num_bytes in change.taken.items():
                now[pool] += num_bytes
                self.totals[pool] += num_bytes
                self.peaks[pool] = max(self.peaks[pool], now[pool])
            for pool, num_bytes in change.given.items():
                now[pool] -= num_bytes

    def shares(self, num_bytes: int) -> dict[str, int]:
        """The part of `num_bytes` that each pool may hold: its peak in text order, which it needs, and an equal part of
        what is left, as far as it can use it. Each pool has gaps of its own, and a device's reserve has room for those
        of one: for those of every other large pool, that much stays free."""
        room = gaps_bytes(num_bytes)
        others = sum(peak > room for peak in self.peaks.values()) - 1
        left = max(0, num_bytes - self.peaks.total() - room * max(0, others))
        found = dict(self.peaks)
        wants = sorted((self.totals[pool] - peak, pool) for pool, peak in self.peaks.items())
        for rank, (most, pool) in enumerate(wants):
            more = min(most, left // (len(wants) - rank))
            found[pool] += more
            left -= more
        return found

    def _change(self, node: fx.Node, work: ops.Work) -> PoolChange:
        taken, given = _Bytes(), _Bytes()
        if node.target is ops.free:
            for value in operands(node):
                if _counts(value):
                    late = self._late.get(self._rest.get(value, value), given)
                    _add(late, self._pool[value], value.meta["type"].bytes)
            return PoolChange(taken, given)
        self._name_pools(node, work)
        grown = _Bytes()
        for value in donated_operands(node):
            if value.meta["type"].memory == ops.DEVICE and not (takes_place(node) and places_of(value)):
                _add(grown, self._pool[value], -value.meta["type"].bytes)
        for value in values_of(node) if not takes_place(node) else ():
            if value.meta["type"].owned and value.meta["type"].memory == ops.DEVICE:
                _add(grown, self._pool[value], value.meta["type"].bytes)
        if work.workspace_memory == ops.DEVICE and not op_of(node).workspace_in_arena:
            _add(taken, work.stream, work.workspace_bytes)
            _add(given, work.stream, work.workspace_bytes)
        for pool, num_bytes in grown.items():
            _add(taken if num_bytes > 0 else given, pool, abs(num_bytes))
        if node.target is ops.backward_weight:
            for value in operands(node):
                for pool, num_bytes in self._late.pop(value, {}).items():
                    _add(given, pool, num_bytes)
        return PoolChange(taken, given)

    def _name_pools(self, node: fx.Node, work: ops.Work) -> None:
        over, made = donated_operands(node), values_of(node)
        for value in made:
            kind = value.meta["type"]
            same = [old for old in over if (old.meta["type"].kind, old.meta["type"].stage) == (kind.kind, kind.stage)]
            self._pool[value] = self._pool[same[0]] if same else work.stream
        if node.target is ops.backward_input:
            rest = made[-1]
            self._late[rest] = _Bytes()
            self._rest.update((v, rest) for v in operands(node) if self._pool.get(v, work.stream) != work.stream)


def _add(found: _Bytes, pool: str, num_bytes: int) -> None:
    if num_bytes:
        found[pool] = found.get(pool, 0) + num_bytes


def pools_of(program: Program) -> Pools:
    """The pools of a typed program. Nobody changes the result but with the program."""
    return program.once(Pools)


def pooled_bytes(program: Program) -> int:
    """The bytes that a GPU may come to hold for a program with types: what lasts, the arena, and the peaks of all
    pools, whenever each is reached. More than the program's peak, and so perhaps than its budget: waits hold each pool
    to its peak, but it keeps what it has once taken."""
    profile = profile_memory(program)
    return profile.persistent.total(ops.DEVICE) + profile.arena_bytes + pools_of(program).peaks.total()


def _counts(value: fx.Node) -> bool:
    kind = value.meta["type"]
    return kind.memory == ops.DEVICE and kind.owned and not places_of(value)
