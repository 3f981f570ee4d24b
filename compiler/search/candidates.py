"""Candidates that are worth a try: numbers of micro-batches and stages, orders of unequal devices, partitions and
mappings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from ...ir.errors import DoesNotFit, PassError, PlanError
from ...ir.machine.call_mix import FP8
from ...ir.machine.hardware import Device, Hardware
from ...passes.draft import Draft
from ...passes.mapping.map_cross import MapCross
from ...passes.mapping.map_replicas import MapReplicas
from ...passes.mapping.map_round_robin import MapRoundRobin
from ...passes.mapping.mapping import Mapping, equal_devices
from ...passes.partition.partition import Partition, has_few_blocks
from ...passes.partition.partition_balanced import PartitionBalanced
from ...passes.partition.partition_max_stage import PartitionMaxStage
from ...passes.partition.partition_min_stage import PartitionMinStage
from ...passes.partition.partition_pipedream import PartitionPipedream
from ...passes.partition_mip.partition_mip import PartitionMip, candidates
from ...passes.rewrite.split_experts import SplitExperts
from ...passes.rewrite.split_linear import SplitLinear
from ...passes.schedule.schedule import Schedule
from ...passes.schedule.schedule_1f1b import Schedule1F1B
from ...passes.schedule.schedule_pipeline import SchedulePipeline
from ...passes.sharding.mesh import Mesh
from ...passes.table import PASSES
from .candidate import PLAIN, Candidate, inputs_may_leave
from .layouts import shared_stages

MOST_ORDERS = 6  # of unequal devices
MORE_OF_MIP, MIP_S = 3, 2.0  # other numbers of stages that are simulated too, and seconds to find them
IN_ORDER = (PartitionMinStage, PartitionMaxStage)


def may_copy(lane: Draft, base: Candidate) -> bool:
    """Whether stages may run on several devices in turn."""
    is_alike = lane.lane_hardware.num_devices >= 3 and len(set(lane.lane_hardware.device_kinds)) == 1
    return is_alike and lane.options.micro_batches > 1 and not base.is_shared and lane.graph.team == 1


def candidates_with_copies(lane: Draft, base: Candidate) -> list[Candidate]:
    """Candidates of which some stages run on several devices in turn: cut for that, and by balance into fewer stages
    than devices."""
    count = lane.lane_hardware.num_devices
    numbers = [n for n in (2, 3, count // 2, count - 1) if 1 < n < min(count, len(lane.blocks) + 1)]
    cuts: list[Partition] = [PartitionPipedream(replicas=True)]
    cuts += [PartitionBalanced(stages=n) for n in dict.fromkeys(numbers)]
    return [base.with_(cut, MapReplicas(), Schedule1F1B()) for cut in cuts]


def micro_batch_counts(batch_size: int, hardware: Hardware) -> tuple[list[int], list[int]]:
    """Divisors of the batch: the one nearest to the number N of devices (Mobius 3.1: M = N), then those up to 4 N; and
    larger ones in a second list, whose smaller micro-batches may fit where none of the first do."""
    devices = hardware.num_devices
    able = divisors(batch_size)
    near = min(able, key=lambda m: (abs(m - devices), m))
    usual = [near, *(m for m in able if m != near and devices < m <= 4 * devices)]
    return usual, [m for m in able if m > max(usual)]


def divisors(number: int) -> list[int]:
    small = [m for m in range(1, math.isqrt(number) + 1) if number % m == 0]
    return [*small, *(number // m for m in reversed(small) if m * m != number)]


def stage_counts(draft: Draft, inputs_leave: bool = False) -> list[int]:
    """The fewest stages that fit and one block a stage; of small models also numbers in between.

    The smaller the stages, the shorter are the first fetch and the last offload, which nothing hides.
    """
    devices, blocks = draft.lane_hardware.num_devices, len(draft.blocks)
    names = tuple(block.name for block in draft.blocks)
    how = (draft.options.micro_batches, draft.options.profiler is None, inputs_leave)
    key = (stage_counts, draft.lane_hardware.model_dump_json(), names, *how)
    if key not in draft.graph.known:  # of many blocks it takes seconds
        draft.graph.known[key] = _fewest(draft, inputs_leave)
    fewest = draft.graph.known[key]
    counts = [fewest, blocks]
    if has_few_blocks(draft):  # else each candidate takes seconds
        counts += [*(fewest + k * devices for k in range(1, 4)), 2 * fewest, 4 * fewest]
    return sorted({n for n in counts if n <= blocks})


def _fewest(draft: Draft, inputs_leave: bool) -> int:
    """The fewest stages that fit, or one block a stage where none do."""
    try:
        return len(PartitionBalanced(inputs_leave=inputs_leave).plan(draft)["stages"])
    except DoesNotFit:
        return len(draft.blocks)


def _speed(device: Device) -> float:
    """The highest rate of what all kinds of devices may have."""
    return max((rate for dtype, rate in device.peak_flops.items() if dtype != FP8), default=0.0)


def device_orders(hardware: Hardware) -> list[str]:
    """Orders of the devices for a contiguous partition that differ in more than equal devices: as numbered, by speed
    and by memory, both ways, and of up to four devices others, `MOST_ORDERS` in all."""
    count = hardware.num_devices
    kind = {device: i for i, members in enumerate(equal_devices(hardware)) for device in members}
    numbered = tuple(range(count))
    orders = [numbered]
    if len(set(kind.values())) > 1:
        by_speed = sorted(numbered, key=lambda d: -_speed(hardware.devices[d]))
        by_memory = sorted(numbered, key=lambda d: -hardware.devices[d].budget_bytes)
        orders += [tuple(order) for order in (by_speed, by_speed[::-1], by_memory, by_memory[::-1])]
        orders += itertools.permutations(numbered) if count <= 4 else ()
    distinct = {tuple(kind[d] for d in order): order for order in reversed(orders)}
    found = [distinct[look] for look in dict.fromkeys(tuple(kind[d] for d in order) for order in orders)]
    return ["" if order == numbered else " ".join(map(str, order)) for order in found[:MOST_ORDERS]]


def scouts(draft: Draft, base: Candidate = PLAIN) -> list[Candidate]:
    """Cheap candidates that show what a number of micro-batches is worth; the last one needs the least memory."""
    hardware = draft.lane_hardware
    counts = stage_counts(draft, base.moves_activations)
    found = [base.with_(balanced_partition(count, base, hardware)) for count in counts]
    if base.uses_ssd:
        found += [base.with_(balanced_partition(len(draft.blocks), base, hardware, order)) for order in fewer(hardware)]
    return found


def lane_scouts(draft: Draft, base: Candidate, mesh: Mesh) -> list[Candidate]:
    """Cheap candidates for a mesh of several lanes: the fewest stages or, where lanes share stages, enough that each is
    small; a pipeline runs by 1F1B, a single device stage by stage, so that it gathers or fetches each once, and also by
    1F1B where it has several micro-batches, so that it holds only one of them."""
    fewest, blocks = stage_counts(draft, base.moves_activations)[0], len(draft.blocks)
    hardware = draft.lane_hardware
    schedule = Schedule1F1B() if mesh.depth > 1 else SchedulePipeline()
    if mesh.shards > 1:
        cut = balanced_partition(min(blocks, max(fewest, shared_stages(mesh))), base, hardware)
        return [base.with_(cut, schedule).holding(False)]
    cuts = [balanced_partition(fewest, base, hardware)]
    cuts += [balanced_partition(blocks, base, hardware)] if mesh.depth == 1 and 1 < fewest < blocks else []
    holding_one = [base.with_(cuts[0], Schedule1F1B())] if mesh.depth == 1 < draft.options.micro_batches else []
    return [*(base.with_(cut, schedule) for cut in cuts), *holding_one]


def partitions(draft: Draft, base: Candidate = PLAIN) -> Iterator[Partition]:
    """Every registered partitioner; balanced ones also in other orders of unequal devices. For stages that lanes share,
    and for teams, only those that cut in order: the others count transfers that shared stages do not make, and know
    nothing of what members exchange."""
    in_order = base.is_shared or draft.graph.team > 1
    for kind in PASSES.values():
        if not issubclass(kind, Partition) or kind is PartitionBalanced or (in_order and kind not in IN_ORDER):
            continue
        options: dict[str, Any] = {"inputs_leave": True} if base.moves_activations and inputs_may_leave(kind) else {}
        yield kind(**options)
    orders = device_orders(draft.lane_hardware)
    for count, order in itertools.product(stage_counts(draft, base.moves_activations), orders):
        yield balanced_partition(count, base, draft.lane_hardware, order)


def fewer(hardware: Hardware) -> list[str]:
    """Orders of half of the devices, a quarter and so on, in turn under each root complex: each device has buffers of
    states in DRAM, so fewer devices need less DRAM, and disks are no faster with more devices."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, device in enumerate(hardware.devices):
        groups.setdefault((device.host, device.root_complex), []).append(index)
    crossed = [d for row in itertools.zip_longest(*groups.values()) for d in row if d is not None]
    counts = itertools.takewhile(lambda n: n >= 1, (hardware.num_devices >> k for k in itertools.count(1)))
    return [" ".join(map(str, crossed[:count])) for count in counts]


def balanced_partition(count: int, base: Candidate, hardware: Hardware, order: str = "") -> PartitionBalanced:
    """Stages for all devices, or those of `order`; of several equal ones, one has all parts of a layer."""
    several = (len(order.split()) or hardware.num_devices) > 1 and len(set(hardware.device_kinds)) == 1
    together = several and (base.find(SplitExperts) or base.find(SplitLinear)) is not None
    return PartitionBalanced(stages=count, order=order, inputs_leave=base.moves_activations, together=together)


def more_of_mip(draft: Draft) -> list[PartitionMip]:
    """Partitions of `partition-mip` into other numbers of stages, those whose predicted steps are the next best."""
    try:
        found = candidates(draft, PartitionMip(deadline_s=MIP_S))[1 : 1 + MORE_OF_MIP]
    except (DoesNotFit, PassError, PlanError):
        return []
    return [PartitionMip(stages=len(row.decision["stages"]), deadline_s=MIP_S / 2) for row in found]


def mappings(hardware: Hardware) -> list[Mapping]:
    """Every registered mapping that gives a stage one device (of the others see `copied`), the most promising one
    first: cross where devices share several root complexes."""
    homes = {(device.host, device.root_complex) for device in hardware.devices}
    first = MapCross if len(homes) > 1 and hardware.num_devices > 2 else MapRoundRobin
    found = [kind() for kind in PASSES.values() if issubclass(kind, Mapping) and kind is not MapReplicas]
    return sorted(found, key=lambda mapping: not isinstance(mapping, first))


def schedules(num_devices: int = 2) -> list[Schedule]:
    """Schedules that train as plain PyTorch does. One device has only two of them: there the others equal these."""
    found = [kind() for kind in PASSES.values() if issubclass(kind, Schedule) and kind.synchronous]
    return found if num_devices > 1 else [p for p in found if isinstance(p, SchedulePipeline | Schedule1F1B)]
