"""Layouts of a machine to try: how many devices share each stage, and how many make a pipeline; the rest are replicas.

N devices have a layout for each pair of divisors. On a small machine the search looks at all, on a large one at those
whose groups are natural units: a device or a few, the devices of a root complex, of a host, of a few hosts, of a rack,
one of each host, all. Lanes that share, and devices of a pipeline, are neighbours in the machine's order, so that each
group is in as few hosts and racks as it can be. Each layout has a lower bound, and an estimate that puts layouts in
order: computation with the bubble of its pipeline, gathers and sums over the links they cross, and the way to DRAM
where states do not fit (MiCS 3.2: the fewer devices share, the less goes between hosts, as long as the states fit).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile

from ...graph.blocks import Block
from ...graph.costs.stage_time import block_seconds
from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT
from ...passes.decisions import Lanes
from ...passes.draft import Draft
from ...passes.sharding.mesh import Mesh
from .bounds import device_seconds

SHARED_STAGES = 32  # stages of a lane that shares them: enough that each is a small part of a device
MOST_TURNS = 1024  # stages times micro-batches of a lane
TURN_S = (0.007, 0.013)  # of work, for a stage and a micro-batch of a lane of one device, and of several
NOT_UNDER = 0.1  # the share of transfers that does not run under computation although it could


@dataclass(frozen=True)
class LayoutEstimate:
    """The lower bound and the estimated step, in seconds, of a layout with `count` micro-batches. `scout_s`: about the
    work of looking at it, in seconds; long pipelines with many micro-batches take most."""

    mesh: Mesh
    count: int
    bound_s: float
    estimate_s: float
    scout_s: float = 0.0


def layouts(hardware: Hardware, most_depth: int) -> list[Mesh]:
    """Layouts of several lanes that divide the devices; one device has none. `most_depth`: the number of blocks. On a
    machine of unequal devices each comes with shares by speed, too."""
    count = hardware.num_devices
    sizes = _sizes(hardware)
    found = []
    for shards, depth in itertools.product(sizes, sizes):
        each = shards * depth
        if depth > most_depth or each > count or count % each or depth == count:
            continue
        found.append(Mesh(shards, depth))
        if shards > 1 and depth > 1 and not _on_one_host(hardware, each):
            found.append(Mesh(shards, depth, "pipeline"))
    unequal = len(set(hardware.device_kinds)) > 1
    return [*found, *(replace(mesh, by_speed=True) for mesh in found if unequal)]


def team_layouts(hardware: Hardware) -> list[tuple[int, Mesh]]:
    """Teams of devices of one host, each with the number of members: several teams as replicas, and as one pipeline."""
    count, on_host = hardware.num_devices, Counter(device.host for device in hardware.devices)
    sizes = [n for n in range(2, count + 1) if count % n == 0 and all(here % n == 0 for here in on_host.values())]
    return [(n, Mesh(depth=depth)) for n in sizes for depth in dict.fromkeys((count // n, 1))]


def _sizes(hardware: Hardware) -> list[int]:
    count, hosts = hardware.num_devices, len(hardware.hosts)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    if count <= WRITTEN_OUT:
        return divisors
    here = sum(device.host == 0 for device in hardware.devices)
    below = sum((device.host, device.root_complex) == (0, 0) for device in hardware.devices)
    natural = {1, 2, 4, below, here, 2 * here, 4 * here, hosts, count, here * hardware.racks.count(0)}
    return [n for n in divisors if n in natural]


def _on_one_host(hardware: Hardware, each: int) -> bool:
    """Whether every `each` neighbours in the machine's order are on one host."""
    hosts = [device.host for device in hardware.devices]
    return all(len(set(hosts[i : i + each])) == 1 for i in range(0, len(hosts), each))


def shared_stages(mesh: Mesh) -> int:
    """The number of stages of a lane that shares them: `SHARED_STAGES`, rounded up to equal numbers per device."""
    return -(-SHARED_STAGES // mesh.depth) * mesh.depth


class LayoutEstimator:
    """The costs of a model on a machine's devices, as far as no layout changes them. `draft` has blocks."""

    def __init__(self, draft: Draft):
        self.draft, self.hardware = draft, draft.machine
        options, graph = draft.options, draft.graph
        params = list({id(p): graph.param_spec(name, p) for name, p in graph.parameters().items()}.values())
        self.weight_bytes = sum(p.bytes for p in params)
        self.grad_bytes = sum(p.grad_bytes for p in params if p.requires_grad)
        self.lasting_bytes = self.weight_bytes + self.grad_bytes + options.optimizer_bytes(params)
        self.kept_bytes = sum(block.cost.kept_bytes for block in draft.blocks)  # of one micro-batch

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds per device of one micro-batch through all blocks, forward and backward."""
        return self._seconds(self.draft.blocks)

    @cached_property
    def chain_s(self) -> float:
        """Seconds on the fastest device of one micro-batch through all blocks from the first trained one on, whose next
        forward waits for its update."""
        return min(self._seconds(list(dropwhile(lambda block: not block.cost.backward_flops, self.draft.blocks))))

    def _seconds(self, blocks: Sequence[Block]) -> list[float]:
        precision = self.draft.options.precision
        measured = any(block.seconds for block in blocks)
        return device_seconds(
            self.hardware, measured, lambda d: sum(block_seconds(b, d, precision).both_s for b in blocks)
        )

    def stages(self, mesh: Mesh) -> int:
        """The number of stages of a lane: one a device, or where lanes share them enough that each is a small part."""
        return min(len(self.draft.blocks), shared_stages(mesh) if mesh.shards > 1 else mesh.depth)

    def estimate(self, mesh: Mesh, count: int) -> LayoutEstimate | None:
        """The estimate with `count` micro-batches, perhaps not the draft's number. None where `count` does not divide
        among the lanes, or where a lane has more turns than are planned in a second or two."""
        found = self._lanes(mesh, count)
        if found is None:
            return None
        lanes, smaller = found.lanes, self.draft.options.micro_batches / count
        each = found.micro_batches or [count * found.team // len(lanes)] * len(lanes)
        most = max(each)
        if most * self.stages(mesh) > MOST_TURNS:
            return None
        together_s = [smaller / sum(1.0 / self.seconds[d] for d in lane) for lane in lanes]
        slowest_s = [max(self.seconds[d] for d in lane) * smaller for lane in lanes]
        room = mesh.shards * max(sum(self.hardware.devices[d].budget_bytes for d in lane) for lane in lanes)
        beyond = max(0.0, 1 - room / self.lasting_bytes)  # what must come from DRAM
        dram_s = self._from_dram_s(len(lanes) / mesh.shards)
        bound_s = max(*(n * own_s for n, own_s in zip(each, together_s)), self.chain_s * smaller, beyond * dram_s)
        fill = mesh.depth - 1
        lane_s = max((n + fill) * max(t, slow / mesh.depth) for n, t, slow in zip(each, together_s, slowest_s))
        guesses = []
        for held, rounds in ((most, 1), (min(most, mesh.depth), most)):  # fill and drain, or 1F1B
            compute_s = lane_s * (1 + self._again(mesh, held, smaller))
            moving_s = rounds * (3 * (beyond > 0) * dram_s + self._gathers_s(mesh, lanes))
            guesses.append(max(compute_s, moving_s) + NOT_UNDER * min(compute_s, moving_s))
        scout_s = TURN_S[mesh.depth > 1] * most * self.stages(mesh)
        return LayoutEstimate(mesh, count, bound_s, min(guesses) + self._sums_s(mesh, lanes), scout_s)

    def _lanes(self, mesh: Mesh, count: int) -> Lanes | None:
        """The lanes with `count` micro-batches; None where they cannot be shared out so, or where shares by speed are
        equal ones."""
        options = replace(self.draft.options, micro_batches=count)
        try:
            found = mesh.plan(replace(self.draft, options=options))
        except PassError:
            return None
        if mesh.by_speed:
            return found if found.micro_batches else None
        return None if count % (len(found.lanes) // found.team) else found

    def _again(self, mesh: Mesh, held: int, smaller: float) -> float:
        """The part of the computation that is done again, since the saved tensors of `held` micro-batches do not fit
        beside what lasts: at most the forward, a third of the computation."""
        parts = mesh.shards * mesh.depth
        room = min(d.budget_bytes for d in self.hardware.devices) - self.lasting_bytes / parts
        kept = self.kept_bytes * smaller / mesh.depth * held
        return min(1.0, max(0.0, 1 - room / kept)) / 3 if kept else 0.0

    def _from_dram_s(self, replicas: float) -> float:
        """Seconds to move all weights once to the devices of every replica, over all root complexes."""
        hosts = self.hardware.hosts
        rate = sum(complex_.bandwidth_down for host in hosts for complex_ in host.root_complexes)
        return replicas * self.weight_bytes / rate

    def _gathers_s(self, mesh: Mesh, lanes: Sequence[Sequence[int]]) -> float:
        """Seconds to gather weights for forward and backward, and to sum and scatter gradients."""
        members = [lane[0] for lane in lanes[: mesh.shards]]
        each_bytes = (2 * self.weight_bytes + self.grad_bytes) / mesh.depth
        return self._ring_s(members, each_bytes, 3 * self.stages(mesh) / mesh.depth)

    def _sums_s(self, mesh: Mesh, lanes: Sequence[Sequence[int]]) -> float:
        members = [lane[0] for lane in lanes[:: mesh.shards]]
        each_bytes = 2 * self.grad_bytes / mesh.depth / mesh.shards
        return self._ring_s(members, each_bytes, 2 * self.stages(mesh) / mesh.depth)

    def _ring_s(self, members: Sequence[int], num_bytes: float, times: float) -> float:
        """Seconds for bytes in `times` turns of a ring, while a host's other devices do the same in other rings; with
        no turns, in one whose latency does not count."""
        if len(members) == 1:
            return 0.0
        devices, network = self.hardware.devices, self.hardware.network
        hosts = {devices[member].host for member in members}
        first, part = devices[members[0]], (len(members) - 1) / len(members)
        here = [device for device in devices if device.host == first.host]
        if len(hosts) > 1 and network is not None:
            rings = len(here) / (len(members) / len(hosts))
            racks = Counter(self.hardware.racks[host] for host in hosts) if self.hardware.racks else Counter[int]()
            rate = network.bandwidth_at(num_bytes / max(times, 1.0) / len(members), len(hosts))
            if network.racks is not None and len(racks) > 1:  # each ring passes a rack's uplink once
                beside = self.hardware.racks.count(next(iter(racks))) / max(racks.values())
                rate = min(rate, network.racks.uplink(len(self.hardware.hosts), network.bandwidth) / beside)
            return rings * part * num_bytes / rate + times * (len(members) - 1) * network.latency_s
        nvlink = self.hardware.hosts[first.host].nvlink_bandwidth
        if nvlink is not None:
            return part * num_bytes / nvlink
        shared = sum(device.root_complex == first.root_complex for device in here)
        root = self.hardware.hosts[first.host].root_complexes[first.root_complex].bandwidth_up
        return part * num_bytes / min(first.d2h_bandwidth, root / shared)


def estimates(draft: Draft, counts: Sequence[int]) -> list[LayoutEstimate]:
    """The estimates of a draft's layouts with these numbers of micro-batches, the best first. The draft has blocks."""
    estimator, meshes = LayoutEstimator(draft), layouts(draft.machine, len(draft.blocks))
    rows = [estimator.estimate(mesh, count) for count in counts for mesh in meshes]
    return sorted((row for row in rows if row is not None), key=lambda row: row.estimate_s)


def diverse_layouts(rows: Sequence[LayoutEstimate], most: int) -> list[LayoutEstimate]:
    """`most` layouts, the best first: the three best, the best of every depth and of every number of shards, and others
    as far as there is room; each once, with the number of micro-batches that suits it."""
    best = list({row.mesh: row for row in reversed(rows)}.values())[::-1]
    best.sort(key=lambda row: row.estimate_s)
    first: dict[tuple[str, int], LayoutEstimate] = {}
    for row in best:
        first.setdefault(("depth", row.mesh.depth), row)
        first.setdefault(("shards", row.mesh.shards), row)
    whole = [row for row in best if row.mesh.shards == 1 and row.mesh.depth > 1]  # pipelines with whole stages
    each = sorted(first.values(), key=lambda row: row.estimate_s)
    chosen = list(dict.fromkeys([*best[:3], *whole[:1], *each, *best]))
    return sorted(chosen[:most], key=lambda row: row.estimate_s)
