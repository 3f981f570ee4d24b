"""Mixed-pipe, step 2: clusters to devices (FTPipe 4.1.2).

In: clusters and what each needs. Out: the device of each. Longest processing time first: the most expensive cluster
goes to the device that would be done first and has the memory. A second start takes the clusters in their order to the
device that would be done first, which suits a synchronous pipeline. Then pairs of clusters change places while
that shortens the step. At last connected clusters of one device become one stage wherever that closes no cycle, which
keeps the pipeline's depth small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .block_sets import Integers
from .estimate import PipelineEstimate
from .graph import BlockGraph, Clusters
from .memory import Footprints, StageMemory

TRIALS = 4000  # exchanges after which no further round begins
FEWEST = 16  # the number of exchanges that are estimated at once, at first
WORTH_WHILE = 0.9995  # an exchange must shorten the step by more than rounding


def longest_first(
    loads: Sequence[Sequence[int]], needs: Sequence[StageMemory], memory: Footprints, swapped: bool, by_bytes: bool
) -> list[int] | None:
    """The device of each stage; `loads`: per device, per stage. None where a stage finds no device with memory for it.
    `by_bytes`: the largest stage first, to the device with the most room, where computation leaves no choice."""
    count = len(needs)
    stages: list[list[int]] = [[] for _ in loads]
    busy = [0] * len(loads)
    device_of = [-1] * count
    order = sorted(range(count), key=lambda j: -max(row[j] for row in loads))
    if by_bytes:
        order = sorted(range(count), key=lambda j: -(needs[j].weight_bytes + needs[j].state_bytes))
    for j in order:
        held = [[needs[i] for i in own] + [needs[j]] for own in stages]
        able = [d for d in range(len(loads)) if memory.fits(d, held[d], swapped)]
        if not able:
            return None
        if by_bytes:
            best = max(able, key=lambda d: (memory.budgets[d] - memory.resident_bytes(held[d]), -busy[d]))
        else:
            best = min(able, key=lambda d: (busy[d] + loads[d][j], d))
        stages[best].append(j)
        busy[best] += loads[best][j]
        device_of[j] = best
    return device_of


def earliest_end(
    flow: PipelineEstimate, needs: Sequence[StageMemory], memory: Footprints, swapped: bool
) -> list[int] | None:
    """The device of each stage: in order, the one with memory for it that ends all micro-batches' forwards first."""
    held: list[list[StageMemory]] = [[] for _ in memory.budgets]
    free = np.zeros((1, len(held)), np.int64)
    done: dict[int, Integers] = {}
    device_of: list[int] = []
    for s, need in enumerate(needs):
        able = [d for d in range(len(held)) if memory.fits(d, [*held[d], need], swapped)]
        if not able:
            return None
        rows = np.array([[*device_of, d] for d in able])
        ends = flow.forward(s, rows, np.repeat(free, len(able), axis=0), done)
        row = min(range(len(able)), key=lambda row: (ends[row, -1], free[0, able[row]], able[row]))
        held[able[row]].append(need)
        device_of.append(able[row])
        done[s] = ends[row : row + 1]
        free[0, able[row]] = ends[row, -1]
    return device_of


def exchange(
    flow: PipelineEstimate, device_of: list[int], needs: Sequence[StageMemory], memory: Footprints, swapped: bool
) -> list[int]:
    """Let stages change devices, alone or in pairs, while the synchronous step gets shorter."""
    best, best_ns = list(device_of), flow.step_ns(device_of)
    num_devices = len(memory.budgets)
    trials = 0
    while trials < TRIALS:
        before_ns = best_ns
        moves: list[tuple[tuple[int, int], ...]] = [
            ((i, best[j]), (j, best[i])) for i, j in itertools.combinations(range(len(best)), 2) if best[i] != best[j]
        ]
        moves += [((i, d),) for i in range(len(best)) for d in range(num_devices) if d != best[i]]
        trials += len(moves)
        at, number = 0, FEWEST
        while at < len(moves):  # many moves at once, up to the first that is made
            some = moves[at : at + number]
            rows = np.repeat([best], len(some), axis=0)
            for row, move in enumerate(some):
                for i, d in move:
                    rows[row, i] = d
            steps_ns = flow.steps_ns(rows)
            for row in np.flatnonzero(steps_ns < best_ns * WORTH_WHILE).tolist():
                trial = rows[row].tolist()
                if _fit(trial, {d for _, d in some[row]}, needs, memory, swapped):
                    best, best_ns = trial, int(steps_ns[row])
                    at, number = at + row + 1, FEWEST
                    break
            else:
                at, number = at + number, 2 * number
        if best_ns >= before_ns * WORTH_WHILE:
            break
    return best


def _fit(
    device_of: Sequence[int], devices: set[int], needs: Sequence[StageMemory], memory: Footprints, swapped: bool
) -> bool:
    held = {d: [need for need, home in zip(needs, device_of) if home == d] for d in devices}
    return all(memory.fits(d, own, swapped) for d, own in held.items())


def merge_components(
    clusters: Clusters, device_of: dict[int, int], graph: BlockGraph, memory: Footprints, swapped: bool
) -> None:
    """Make connected clusters of one device one stage. `device_of` keeps the clusters that are left."""
    changed = True
    while changed:
        changed = False
        for a in clusters.list_in_order():
            for b in sorted(clusters.succ.get(a, ()), key=clusters.place.__getitem__):
                if device_of[a] != device_of[b] or not _one_stage_fits(clusters, a, b, device_of, memory, swapped):
                    continue
                if clusters.merge(a, b):
                    del device_of[b]
                    changed = True
                    break


def _one_stage_fits(
    clusters: Clusters, a: int, b: int, device_of: dict[int, int], memory: Footprints, swapped: bool
) -> bool:
    """Whether a device holds two of its clusters as one stage, which keeps more saved tensors at once."""
    device = device_of[a]
    others = [memory.stage(clusters.members[c]) for c in device_of if device_of[c] == device and c not in (a, b)]
    return memory.fits(device, [*others, memory.stage(clusters.members[a] + clusters.members[b])], swapped)
