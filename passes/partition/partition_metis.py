"""`partition-metis`: general graph partitioning of the blocks, then repair of its cycles (a rival of FTPipe 4.2).

In: blocks with costs. Out: `draft.partition` and `draft.stages`. METIS cuts the undirected graph of blocks, weighted
with seconds and with bytes of messages, into one part per device with the least bytes between parts; faster devices
take more. A part need not be one stage: its blocks of the same level are one, where the level is the number of changes
of device on the way to a block. A message always leads to a higher level, so the graph of these stages is acyclic and
each of them convex. A stage that does not fit its device is cut into the fewest pieces that do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from ..draft import Draft
from ..mapping.mapping import equal_devices
from .loads import BlockIds, Loads, decision_of
from .partition import Partition, StagesDecision

SCALE = 10**6  # METIS takes integers: all weights of a kind add up to about this


@dataclass(frozen=True)
class PartitionMetis(Partition):
    name: ClassVar[str] = "partition-metis"
    rank: ClassVar[int] = 36

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where a block is larger than any device, or a device cannot hold the inputs of all its
        stages."""
        loads = Loads(draft)
        device_of = _renumber(draft, _where_they_fit(loads, device_parts(loads)))
        levels: dict[tuple[int, int], list[int]] = defaultdict(list)
        for block, level in enumerate(levels_of(loads, device_of)):
            levels[level, device_of[block]].append(block)
        stages: list[tuple[int, BlockIds]] = []  # device, blocks
        for (_, device), blocks in sorted(levels.items()):
            stages += ((device, piece) for piece in _pieces(loads, blocks, device))
        for device in range(draft.lane_hardware.num_devices):
            own = [stage for d, stage in stages if d == device]
            if not loads.fits(own, device):
                raise loads.does_not_fit(own, device, "partition-metis")
        return decision_of(draft, [stage for _, stage in stages], [device for device, _ in stages])


def device_parts(loads: Loads) -> list[int]:
    """The device of each block, with the least bytes between devices and each device busy as long as the others."""
    length = len(loads.blocks)
    total_s = [sum(row) for row in loads.time_s]
    fastest = sorted(range(len(total_s)), key=total_s.__getitem__)[:length]  # the others get nothing
    devices = sorted(fastest)
    if len(devices) == 1:
        return devices * length
    edges: dict[int, dict[int, float]] = {i: defaultdict(float) for i in range(length)}
    for value, readers in loads.readers.items():
        for reader in readers:
            edges[loads.home[value]][reader] += loads.value_bytes(value)
            edges[reader][loads.home[value]] += loads.value_bytes(value)
    import pymetis  # here: planning for one device does not need it, and some machines lack it

    starts = [0]
    for row in edges.values():
        starts.append(starts[-1] + len(row))
    speed = [1 / total_s[device] for device in devices]
    found = pymetis.part_graph(
        len(devices),
        pymetis.CSRAdjacency(starts, [j for row in edges.values() for j in row]),
        vweights=_integers([sum(row[i] for row in loads.time_s) for i in range(length)]),
        eweights=_integers([weight for row in edges.values() for weight in row.values()]),
        tpwgts=[s / sum(speed) for s in speed],
        options=pymetis.Options(seed=0),
    )
    return [devices[part] for part in found.vertex_part]


def _integers(weights: list[float]) -> list[int]:
    total = sum(weights) or 1.0
    return [max(1, round(SCALE * weight / total)) for weight in weights]


def _where_they_fit(loads: Loads, device_of: list[int]) -> list[int]:
    """Move blocks that do not fit their device to the least busy device that holds them."""
    fixed = list(device_of)
    for block, device in enumerate(device_of):
        if not loads.fits([(block,)], device):
            able = [d for d in range(len(loads.devices)) if loads.fits([(block,)], d)]
            if not able:
                largest = max(range(len(loads.devices)), key=lambda d: loads.devices[d].budget_bytes)
                raise loads.does_not_fit([(block,)], largest, "partition-metis")
            busy_s = {d: sum(loads.time_s[d][i] for i, own in enumerate(fixed) if own == d) for d in able}
            fixed[block] = min(able, key=busy_s.__getitem__)
    return fixed


def _renumber(draft: Draft, device_of: list[int]) -> list[int]:
    """Renumber equal devices in the order of their first block: METIS numbers its parts arbitrarily."""
    place: dict[int, int] = {}
    for group in equal_devices(draft.lane_hardware):
        in_use = [device for device in dict.fromkeys(device_of) if device in group]
        place.update(zip(in_use, group))
    return [place[device] for device in device_of]


def levels_of(loads: Loads, device_of: list[int]) -> list[int]:
    """Per block the largest number of changes of device on any way to it."""
    levels: list[int] = []
    for block, makers in enumerate(loads.before):
        levels.append(max((levels[i] + (device_of[i] != device_of[block]) for i in makers), default=0))
    return levels


def _pieces(loads: Loads, blocks: list[int], device: int) -> list[BlockIds]:
    pieces: list[BlockIds] = [()]
    for block in blocks:
        longer = (*pieces[-1], block)
        if pieces[-1] and not loads.fits([longer], device):
            pieces.append((block,))
        else:
            pieces[-1] = longer
    return pieces
