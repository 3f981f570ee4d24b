"""Estimates teams by theory before any graph is divided: the step of each layout, which gives the order of tries.

A team divides weights among its members: all of them by columns (width), or those of experts. What a device computes is
its part of all, and a bubble where teams are pipelines. What it sends: of width, four sums of the hidden states a layer
(Megatron-LM 3, g and its conjugate, forward and backward); of experts, each token to all members that have some of its
own, and one row back of each, twice (GShard 3.2). What it must move: weights for which it has no room come from DRAM,
and then a host steps all copies of the parameters that its devices have. A team of one member is a plain pipeline of
replicas, whose estimate the others are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...graph.experts.layers import ExpertLayer, find_expert_layers, is_of_rows
from ...graph.experts.token_sums import rows_of_each
from ...graph.opgraph import value_tensors
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...passes.draft import Draft
from ...passes.sharding.mesh import Mesh
from .bounds import machine_disks
from .layouts import NOT_UNDER, LayoutEstimator, team_layouts

PASSES_OVER_ROWS = 3  # forward, and backward's two


@dataclass(frozen=True)
class TeamEstimate:
    """The estimated seconds of a step of teams of `members` in the lanes of `mesh`, with `count` micro-batches."""

    members: int
    mesh: Mesh
    count: int
    estimate_s: float


class TeamEstimator(LayoutEstimator):
    """Estimates for teams on a machine of equal devices. `draft`: layers of the undivided model on all devices."""

    def __init__(self, draft: Draft):
        super().__init__(draft)
        layers = find_expert_layers(draft.graph).values()
        self.expert_bytes = sum(layer.bytes for layer in layers)
        self.routed = [(_end_bytes(layer), layer.experts, rows_of_each(draft.graph, layer)) for layer in layers]
        self.inside_bytes = sum(layer.row_bytes for layer in layers)
        self.hidden_bytes = sum(
            max((t.numel() * t.element_size() for n in block.outputs for t in value_tensors(n.meta["val"])), default=0)
            for block in draft.blocks
        )

    def routed_bytes(self, members: int) -> float:
        """Bytes of what goes to the experts that members share out, and comes back, forward."""
        return sum(rows / each * ops.token_visits(members, experts, each) for rows, experts, each in self.routed)

    @cached_property
    def calls_s(self) -> float:
        """Seconds to begin the calls of one micro-batch, forward and backward."""
        return 3 * len(self.draft.graph.nodes) * max(device.op_overhead_s for device in self.hardware.devices)

    def _from_dram_s(self, replicas: float) -> float:
        """Seconds to move all weights `replicas` times to devices, over links of their own and root complexes."""
        each = sum(device.h2d_bandwidth for device in self.hardware.devices)
        return max(super()._from_dram_s(replicas), replicas * self.weight_bytes / each)

    @cached_property
    def disk_s(self) -> float:
        """Seconds for what neither devices nor DRAM can hold."""
        return max((bound.seconds for bound in machine_disks(self.draft)), default=0.0)

    def step_seconds(self, width: bool, members: int, mesh: Mesh, count: int) -> float:
        """Seconds of a step. `width`: members have columns of all weights; else some experts, and all other weights."""
        devices, hosts = self.hardware.num_devices, self.hardware.hosts
        teams = devices // (members * mesh.depth)
        whole = self.draft.options.micro_batches  # times what is counted of one micro-batch of the draft
        each = count / teams
        compute_s = whole / sum(1.0 / seconds for seconds in self.seconds)
        compute_s += each / mesh.depth * (self.calls_s if members > 1 else 0.0)  # of parts of layers, which are small
        compute_s *= 1 + (mesh.depth - 1) / each
        divided = self.weight_bytes if width else self.expert_bytes
        here = (divided / members + self.weight_bytes - divided) / self.weight_bytes / mesh.depth  # of all weights
        room = min(device.budget_bytes for device in self.hardware.devices)
        lasting = self.lasting_bytes * here / mesh.shards
        kept = self.kept_bytes * whole / count / members / mesh.depth * min(each, mesh.depth)
        compute_s *= 1 + min(1.0, max(0.0, 1 - (room - lasting) / kept)) / 3 if kept else 1.0
        copies = devices * here / mesh.shards
        moved_s = 0.0
        if lasting > room:
            stays = (self.weight_bytes + self.grad_bytes) * here / mesh.shards <= room
            moved_s = self._from_dram_s(copies) * (1 if stays else 3)
            rate = sum(host.optimizer_params_per_s for host in hosts)
            moved_s = max(moved_s, copies * self.num_trained_params / rate)
        line = list(range(members))  # neighbours in the machine's order
        if members == 1:
            sent_s = 0.0
        elif width:
            sent_s = self._ring_s(line, 8 * self.hidden_bytes * whole / teams / mesh.depth, 0.0)
        else:
            sent_s = self._ring_s(line, 2 * self.routed_bytes(members) * whole / devices, 0.0)
            rows = PASSES_OVER_ROWS * members * self.inside_bytes * whole / devices  # zeros are computed, too
            sent_s += rows / min(device.memory_bandwidth for device in self.hardware.devices)
        shared = [lane * members * mesh.depth for lane in range(teams)]
        alike = list(range(devices)) if not width and members > 1 else shared  # who has the same weights
        summed = self.grad_bytes * (here if width or members == 1 else 1 - self.expert_bytes / self.weight_bytes)
        sent_s += self._ring_s(alike, 2 * summed, 0.0) if len(alike) > 1 and mesh.shards == 1 else 0.0
        if mesh.shards > 1:
            sent_s += self._ring_s(shared, (2 * self.weight_bytes + self.grad_bytes) * here, 0.0)
        parts = sorted((compute_s + sent_s * (1 - NOT_UNDER), moved_s, self.disk_s))
        return parts[-1] + NOT_UNDER * (sum(parts[:-1]) + sent_s)

    @cached_property
    def num_trained_params(self) -> int:
        params = {id(p): p for p in self.draft.graph.parameters().values()}.values()
        return sum(p.numel() for p in params if p.requires_grad)

    def estimates(self, width: bool, counts: Sequence[int], rows: int) -> Iterator[TeamEstimate]:
        """Those of all teams and layouts of these, with each number of micro-batches of `rows` in all that they can
        share out."""
        for members, mesh in every_layout(self.hardware):
            teams = self.hardware.num_devices // (members * mesh.depth)
            for count in counts:
                if count % teams == 0 and (width or rows // count % members == 0):
                    yield TeamEstimate(members, mesh, count, self.step_seconds(width, members, mesh, count))

    def alone_s(self, counts: Sequence[int]) -> float:
        """The shortest estimate without teams: replicas of pipelines, which share weights or not."""
        devices, found = self.hardware.num_devices, []
        for depth in [n for n in range(1, devices + 1) if devices % n == 0]:
            lanes = devices // depth
            for mesh in dict.fromkeys((Mesh(depth=depth), Mesh(shards=lanes, depth=depth))):
                found += [self.step_seconds(True, 1, mesh, n) for n in counts if n % lanes == 0]
        return min(found, default=math.inf)


def _end_bytes(layer: ExpertLayer) -> int:
    """Bytes of the rows that enter a layer of experts and that leave it."""
    ends = [node for node in (*layer.entering, *layer.leaving) if is_of_rows(node, layer.rows)]
    return sum(t.numel() * t.element_size() for node in ends for t in value_tensors(node.meta["val"]))


def every_layout(hardware: Hardware) -> Iterator[tuple[int, Mesh]]:
    """Teams of devices of one host as pipelines of any length; teams in the same place also share weights."""
    for members in dict.fromkeys(members for members, _ in team_layouts(hardware)):
        left = hardware.num_devices // members
        for depth in [n for n in range(1, left + 1) if left % n == 0]:
            yield members, Mesh(depth=depth)
            if left // depth > 1:
                yield members, Mesh(shards=left // depth, depth=depth)
