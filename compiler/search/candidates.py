"""What is worth a try: numbers of micro-batches and stages, orders of unequal devices, and pipelines of passes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.errors import DoesNotFit, PassError, PlanError
from ...ir.machine.hardware import Hardware
from ...passes.draft import Draft
from ...passes.mapping.mapping import equal_devices
from ...passes.partition.partition_balanced import PartitionBalanced
from ...passes.partition_mip.partition_mip import PartitionMip, candidates
from ..plan_layout import Layout
from ..strategies import PASSES, STRATEGIES
from .layouts import shared_stages

FEW_BLOCKS = 32  # up to this many, or eight a device, stages of every size are worth a try
MOST_ORDERS = 6  # of unequal devices
MORE_OF_MIP, MIP_S = 3, 2.0  # other numbers of stages that are simulated too, and seconds to find them
TO_SSD = "insert-ssd"
SLOW = "partition-mixed"  # takes longer than all others together, so it comes behind them
IN_ORDER = ("partition-min-stage", "partition-max-stage")
ONE_LANE = Layout()
ONE_F_ONE_B = "schedule-1f1b"
PLAIN = ("partition-balanced", "map-round-robin", "schedule-pipeline")


@dataclass(frozen=True)
class Recipe:
    """A pipeline by the passes that candidates differ in. `swap`: weights come from DRAM though they could stay;
    `activations`: each class of them is kept, moved or computed again; `reservoir`: what DRAM cannot hold lies on SSD,
    and the optimizer runs under the backward pass. `layout`: of the devices as lanes; with shards `swap` means that all
    is computed again, and `hold` that stages stay whole for all micro-batches as far as there is room.

    `named`: a strategy's whole line instead.
    """

    partition: str = PLAIN[0]
    mapping: str = PLAIN[1]
    schedule: str = PLAIN[2]
    swap: bool = False
    activations: bool = False
    reservoir: bool = False
    layout: Layout = ONE_LANE
    hold: bool = True
    named: str = ""

    @property
    def line(self) -> str:
        if self.named:
            return STRATEGIES.get(self.named, self.named)
        mesh = [self.layout.text] if self.layout.depth else []
        parts = ["coarsen", *mesh, self.partition, self.mapping, self.schedule]
        return ", ".join([*parts, *(self._sharded if self.layout.shards > 1 else self._whole)])

    @property
    def _whole(self) -> list[str]:
        """Passes behind the schedule, of stages that no other lane shares."""
        swap = ["swap=true"] if self.swap else []
        activations = _with_options("insert-remat", swap)
        if self.activations:
            activations = _with_options("choose-activations", [*swap, *([] if self.reservoir else ["tier=none"])])
        update = ["insert-ssd", "overlap-optimizer"] if self.reservoir else ["insert-optimizer"]
        return [activations, _with_options("insert-fetch", swap), *update]

    @property
    def _sharded(self) -> list[str]:
        remat = _with_options("insert-remat", ["always=true"] if self.swap else [])
        options = [*(["tier=ssd"] if self.reservoir else []), *([] if self.hold else ["hold=false"])]
        shard = _with_options("insert-shard", options)
        if self.reservoir:
            return [remat, shard, "insert-ssd", "overlap-optimizer"]
        return [remat, shard, "insert-two-hop{every=auto}", "insert-optimizer"]

    @property
    def label(self) -> str:
        """For the table of rivals: what is usual is left out."""
        if self.named:
            return self.named
        parts = [self.layout.text] if self.layout.depth else []
        parts += [self.partition, *([] if self.layout.depth == 1 else [self.mapping])]
        parts += [] if self.schedule == PLAIN[2] else [self.schedule]
        parts += [("all computed again" if self.layout.shards > 1 else "swapped")] if self.swap else []
        parts += ["activations chosen"] if self.activations else []
        parts += [] if self.hold else ["none held"]
        return ", ".join([*parts, *(["reservoir"] if self.reservoir else [])])

    @property
    def is_slow(self) -> bool:
        return SLOW in self.line

    @property
    def uses_ssd(self) -> bool:
        return TO_SSD in self.line

    def but(self, **changes: object) -> Recipe:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _with_options(name: str, options: list[str]) -> str:
    return f"{name}{{{', '.join(options)}}}" if options else name


def micro_batch_counts(batch_size: int, hardware: Hardware) -> tuple[list[int], list[int]]:
    """Divisors of the batch: as many as devices first (Mobius 3.1: M = N), then up to four times as many; and those
    beyond, whose smaller micro-batches may fit where none of these does."""
    devices = hardware.num_devices
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    near = min(divisors, key=lambda m: (abs(m - devices), m))
    usual = [near, *(m for m in divisors if m != near and devices < m <= 4 * devices)]
    return usual, [m for m in divisors if m > max(usual)]


def stage_counts(draft: Draft, inputs_leave: bool = False) -> list[int]:
    """The fewest stages that fit and one block a stage; of small models also what lies between.

    The smaller the stages, the less of the first fetch and the last offload has nothing to hide under.
    """
    devices, blocks = draft.lane_hardware.num_devices, len(draft.blocks)
    try:
        fewest = len(PartitionBalanced(inputs_leave=inputs_leave).plan(draft)["stages"])
    except DoesNotFit:
        fewest = blocks
    counts = [fewest, blocks]
    if blocks <= max(FEW_BLOCKS, 8 * devices):  # else each candidate takes seconds
        counts += [*(fewest + k * devices for k in range(1, 4)), 2 * fewest, 4 * fewest]
    return sorted({n for n in counts if n <= blocks})


def device_orders(hardware: Hardware) -> list[str]:
    """Orders of the devices for a contiguous partition that differ in more than equal devices; the first is as
    numbered. Of many: by speed and by memory, both ways."""
    count = hardware.num_devices
    kind = {device: i for i, members in enumerate(equal_devices(hardware)) for device in members}
    numbered = tuple(range(count))
    orders = [numbered]
    if len(set(kind.values())) > 1:
        by_speed = sorted(numbered, key=lambda d: -max(hardware.devices[d].peak_flops.values()))
        by_memory = sorted(numbered, key=lambda d: -hardware.devices[d].budget_bytes)
        orders += [tuple(order) for order in (by_speed, by_speed[::-1], by_memory, by_memory[::-1])]
        orders += itertools.permutations(numbered) if count <= 4 else ()
    distinct = {tuple(kind[d] for d in order): order for order in reversed(orders)}
    found = [distinct[look] for look in dict.fromkeys(tuple(kind[d] for d in order) for order in orders)]
    return ["" if order == numbered else " ".join(map(str, order)) for order in found[:MOST_ORDERS]]


def scouts(draft: Draft, base: Recipe = Recipe()) -> list[Recipe]:
    """Cheap candidates that show what a number of micro-batches is worth; the last one needs the least memory."""
    found = [base.but(partition=balanced(count, base)) for count in stage_counts(draft, base.activations)]
    if base.reservoir:
        found += [base.but(partition=balanced(len(draft.blocks), base, order)) for order in fewer(draft.lane_hardware)]
    return found


def lane_scouts(draft: Draft, base: Recipe) -> list[Recipe]:
    """Cheap candidates for a layout of several lanes: the fewest stages, or where lanes share them so many that one is
    a small part of a device; a pipeline by 1F1B, a single device stage by stage, which gathers or fetches each once."""
    fewest, blocks = stage_counts(draft, base.activations)[0], len(draft.blocks)
    schedule = ONE_F_ONE_B if base.layout.depth > 1 else PLAIN[2]
    if base.layout.shards > 1:
        cuts = [balanced(min(blocks, max(fewest, shared_stages(base.layout))), base)]
        return [base.but(partition=cut, schedule=schedule, hold=False) for cut in cuts]
    cuts = [balanced(fewest, base)]
    cuts += [balanced(blocks, base)] if base.layout.depth == 1 and 1 < fewest < blocks else []
    return [base.but(partition=cut, schedule=schedule) for cut in cuts]


def partitions(draft: Draft, base: Recipe = Recipe()) -> Iterator[str]:
    """Every registered partitioner; balanced ones also in other orders of unequal devices. Of stages that lanes share
    only cuts in order: what comes from where is not as the others reckon."""
    for name, kind in PASSES.items():
        if base.layout.shards > 1 and name not in IN_ORDER:
            continue
        if kind.decides == "stages" and kind is not PartitionBalanced:
            can_leave = any(f.name == "inputs_leave" for f in dataclasses.fields(kind))
            yield _with_options(name, ["inputs_leave=true"] if base.activations and can_leave else [])
    orders = device_orders(draft.lane_hardware)
    for count, order in itertools.product(stage_counts(draft, base.activations), orders):
        yield balanced(count, base, order)


def fewer(hardware: Hardware) -> list[str]:
    """Orders of half of the devices, a quarter and so on, in turn under each root complex: as buffers of states in DRAM
    belong to devices, fewer of these need less of it, and disks are no faster for more."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, device in enumerate(hardware.devices):
        groups.setdefault((device.host, device.root_complex), []).append(index)
    crossed = [d for row in itertools.zip_longest(*groups.values()) for d in row if d is not None]
    counts = itertools.takewhile(lambda n: n >= 1, (hardware.num_devices >> k for k in itertools.count(1)))
    return [" ".join(map(str, crossed[:count])) for count in counts]


def balanced(count: int, base: Recipe, order: str = "") -> str:
    options = [f"stages={count}", *([f"order={order}"] if order else [])]
    return _with_options("partition-balanced", [*options, *(["inputs_leave=true"] if base.activations else [])])


def more_of_mip(draft: Draft) -> list[str]:
    """Partitions of `partition-mip` into other numbers of stages, whose predicted steps come next."""
    try:
        found = candidates(draft, PartitionMip(deadline_s=MIP_S))[1 : 1 + MORE_OF_MIP]
    except (DoesNotFit, PassError, PlanError):
        return []
    return [f"partition-mip{{stages={len(row.decision['stages'])}, deadline_s={MIP_S / 2:g}}}" for row in found]


def mappings(hardware: Hardware) -> list[str]:
    """Every registered mapping; first the one that promises most: cross where devices share several root complexes."""
    names = [name for name, kind in PASSES.items() if kind.decides == "devices" and "devices" in kind.gives]
    homes = {(device.host, device.root_complex) for device in hardware.devices}
    first = "map-cross" if len(homes) > 1 and hardware.num_devices > 2 else PLAIN[1]
    return sorted(names, key=lambda name: name != first)


def schedules(num_devices: int = 2) -> list[str]:
    """Those that train as plain PyTorch does; on a single device only such as need no other to differ from these."""
    names = [name for name, kind in PASSES.items() if kind.decides == "schedule" and kind.synchronous]
    return names if num_devices > 1 else [name for name in names if name in (PLAIN[2], ONE_F_ONE_B)]
