"""Fetches of weights as a queue: each is issued the most phases ahead of its own that memory allows.

In: a device's phases, with fetches that come one phase ahead at most. Out: how many phases ahead each may come, so that
a large stage, such as a head with its vocabulary, is on its way while several small stages before it compute. Fetches
keep the order in which their stages run, as one stream carries them all. Memory holds at every moment in between, by
the places that values get in the arena.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...ir.program import ArenaPlaces, Program, StageSpec, work_of
from ...runtime.simulate.costs import CostModel
from ..phases import Phase, fetched_phases

AHEAD = "_ahead"  # "forward_ahead" beside "forward" in a decision
LEAST_GAIN = 1e-3  # of the estimated seconds; for less, a queue is not worth a simulation
TRIES = 6  # of limits, until the arena fits in spite of its gaps


@dataclass(frozen=True)
class Fetches:
    """The early fetches. `counts`: phase to the number of its parameters that are fetched before it; `ahead`: phase to
    the number of phases by which it is early, 1 for phases that are not named."""

    counts: Mapping[int, int]
    ahead: Mapping[int, int] = field(default_factory=dict)

    def place(self, i: int) -> int:
        """The phase at whose start the early part of phase `i` is fetched."""
        return max(0, i - self.ahead.get(i, 1))


def arena_bytes(order: Sequence[Phase], specs: Mapping[str, StageSpec], stages: Collection[str], early: Fetches) -> int:
    """The bytes of the arena of `plan_arena` for the program with these early fetches."""
    arriving: dict[int, list[tuple[int, int]]] = {}  # phase -> phases for which something comes, and its bytes
    for now, i, num_bytes in _arrivals(order, specs, stages, early):
        arriving.setdefault(now, []).append((i, num_bytes))
    arena = ArenaPlaces(alignment=1)  # for parts of weights, whose bytes are aligned
    leaving: dict[int, list[tuple[int, int]]] = {}  # last phase -> values
    first: dict[int, tuple[int, int]] = {}  # phase -> the first value that comes for it
    for now in range(len(order)):
        for i, num_bytes in arriving.get(now, ()):
            arena.take((now, i), num_bytes, first.setdefault(i, (now, i)))
            leaving.setdefault(order[i].last, []).append((now, i))
        for value in leaving.pop(now, ()):
            arena.give(value)
    return arena.bytes


def live_bytes(
    order: Sequence[Phase], specs: Mapping[str, StageSpec], stages: Collection[str], early: Fetches
) -> list[int]:
    """The bytes of fetched weights in the arena during each phase; the arena is no smaller than any of them."""
    live = [0] * len(order)
    for now, i, num_bytes in _arrivals(order, specs, stages, early):
        for t in range(now, order[i].last + 1):
            live[t] += num_bytes
    return live


def _arrivals(
    order: Sequence[Phase], specs: Mapping[str, StageSpec], stages: Collection[str], early: Fetches
) -> Iterator[tuple[int, int, int]]:
    """The phase at whose start something is fetched, the phase for which it is, and its bytes; by the latter."""
    for i in fetched_phases(list(order), stages):
        spec = specs[order[i].stage]
        part = spec.part_bytes(early.counts.get(i, 0)) if i > 0 else 0
        if part:
            yield early.place(i), i, part
        if part < spec.weight_bytes:
            yield i, i, spec.weight_bytes - part


def deepen(
    order: Sequence[Phase],
    specs: Mapping[str, StageSpec],
    stages: Collection[str],
    counts: Mapping[int, int],
    limit_bytes: int,
) -> Fetches:
    """The same early fetches, each the most phases ahead that keep the arena within the limit."""
    one_ahead = Fetches(counts)
    limit = limit_bytes
    for _ in range(TRIES):
        found = Fetches(counts, _alike(order, _depths(order, specs, stages, one_ahead, limit)))
        over_bytes = arena_bytes(order, specs, stages, found) - limit_bytes
        if over_bytes <= 0:
            return found
        limit -= over_bytes
    return one_ahead


def _depths(
    order: Sequence[Phase], specs: Mapping[str, StageSpec], stages: Collection[str], early: Fetches, limit_bytes: int
) -> dict[int, int]:
    """Per phase that is fetched whole before its own, the depth at which bytes fit, whatever gaps there are."""
    live = live_bytes(order, specs, stages, early)
    begins = dict.fromkeys(i for _, i, _ in _arrivals(order, specs, stages, early))
    found: dict[int, int] = {}
    before = 0  # the place of the fetch before
    for i in begins:
        spec = specs[order[i].stage]
        if early.counts.get(i, 0) < len(spec.moving):  # its rest is fetched at its own phase
            before = i
            continue
        place = i - 1
        while place > before and live[place - 1] + spec.weight_bytes <= limit_bytes:
            place -= 1
            live[place] += spec.weight_bytes
        found[i], before = i - place, place
    return found


def _alike(order: Sequence[Phase], depths: Mapping[int, int]) -> dict[int, int]:
    """The same depth for all phases of a stage and kind, as a decision has it."""
    least: dict[tuple[str, str], int] = {}
    for i, depth in depths.items():
        key = order[i].stage, order[i].kind
        least[key] = min(depth, least.get(key, depth))
    return {i: least[order[i].stage, order[i].kind] for i in depths}


def phases_s(program: Program, order: Sequence[Phase], model: CostModel) -> list[float]:
    """The seconds that each phase computes."""
    owner = model.hardware.devices[program.device]
    return [sum(model.compute_s(owner, work_of(program, node)) for node in phase.nodes) for phase in order]


def estimate_s(
    order: Sequence[Phase],
    specs: Mapping[str, StageSpec],
    stages: Collection[str],
    early: Fetches,
    computing_s: Sequence[float],
    bytes_per_s: float,
) -> float:
    """Seconds of a device that waits for its own fetches only. A fetch begins when the one before it has ended, and the
    phase before that at whose start it is issued: that has left the memory."""
    ended = [0.0] * (len(order) + 1)  # of phase i - 1
    arrived = [0.0] * len(order)
    issued: dict[int, list[tuple[int, int]]] = {}
    for now, i, num_bytes in _arrivals(order, specs, stages, early):
        issued.setdefault(now, []).append((i, num_bytes))
    link_s = 0.0
    for now in range(len(order)):
        for i, num_bytes in issued.get(now, ()):
            link_s = max(link_s, ended[now]) + num_bytes / bytes_per_s
            arrived[i] = link_s
        ended[now + 1] = max(ended[now], arrived[now]) + computing_s[now]
    return ended[-1]


def least_s(
    order: Sequence[Phase],
    specs: Mapping[str, StageSpec],
    stages: Collection[str],
    computing_s: Sequence[float],
    bytes_per_s: float,
) -> float:
    """The seconds below which no queue comes: all computation after the first fetch, or all fetches before the last."""
    begins = fetched_phases(list(order), stages)
    first_s, last = specs[order[begins[0]].stage].weight_bytes / bytes_per_s, begins[-1]
    moved_s = sum(specs[order[i].stage].weight_bytes for i in begins) / bytes_per_s
    return max(first_s + sum(computing_s), moved_s + sum(computing_s[last:]))
