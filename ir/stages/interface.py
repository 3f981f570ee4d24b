"""The interface that all programs of one plan share: stages, batch, groups of devices and lanes."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import pydantic
import torch
from torch import Tensor

from .. import names
from ..documents import Unreadable, plain_errors
from ..errors import BatchError
from ..precision import MASTER_BYTES, ROUNDED_ELEMENTS, TILED_ELEMENTS
from .flat import Segment
from .hooks import wrong_calls
from .row_part import wrong_parts
from .sizes import SIZES, SizeRange, wrong_expression
from .stage import PAGE, STATE_ROOM, ParamSpec, StageSpec, TeamPart, TensorSpec, aligned

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST = 1 << 20  # devices, micro-batches, stages
MOST_ELEMENTS = 1 << 56  # of a tensor: its bytes still fit into 64 bits


@dataclass(frozen=True)
class Interface:
    """The names that all programs of one plan share and their texts refer to.

    `groups` has the members of each group by its name: (device, stage, parameter name), reduced together. A member
    without a parameter name takes part with the whole value, one without a stage with any stage; "world" is every
    device.
    `lanes` has the machine's devices of each lane, in the order of the programs (see `lanes.py`); `num_devices` and
    `micro_batches` are then those of one lane. The groups `SHARDS` and `REPLICAS` join devices of different lanes and
    have no rows. Every `shards` consecutive lanes share each stage's weights; every `team` consecutive lanes, whose
    devices in one place are the group `TEAM`, run the same micro-batches together. `lane_micro_batches` has the number
    of each lane where they are not the same; `micro_batches` is then the most of them (see `shares.py`).
    `scale_lag`: a mini-batch's loss scale knows the norms of those that are more than this number before it.
    `state_bytes_per_param` is the size of the optimizer states of one trained parameter; `states` has the bytes of each
    stage where that is not the same for each of its parameters, and under `shard_key` of each shard. `master`: fp32
    copies exist beside the weights.
    `asynchronous`: every `accumulate` micro-batches of a lane are a mini-batch, with one update of each stage.
    `rounds`: bf16 weights without masters are updated in fp32, a portion at once, and the result is rounded
    stochastically. `tiles`: a host updates parameters in tiles. `temporaries` has, by the memory in which a stage is
    updated, and by stage and shard as `states`, the bytes that the optimizer's own step takes while it runs; a memory
    that is not there has none. `cuda_graphs`: stages run from these where `graphs.py` says so. `sizes`: what the named
    sizes of a micro-batch may be; the input `SIZES` then has those of each micro-batch, in this order.
    `divided`: members of a team hold parts of parameters, each its own (`TeamPart`). `apart`: members of a team have
    different tokens, so that gradients of a parameter that all of them hold are summands.
    """

    stages: dict[str, StageSpec]
    batch: dict[str, TensorSpec]  # of one micro-batch
    num_devices: int = 1
    micro_batches: int = 1
    groups: dict[str, tuple[tuple[int, str, str], ...]] = field(default_factory=dict)
    state_bytes_per_param: float = 8.0
    master: bool = False
    states: dict[str, int] = field(default_factory=dict)
    lanes: tuple[tuple[int, ...], ...] = ()
    shards: int = 1
    lane_micro_batches: tuple[int, ...] = ()
    asynchronous: bool = False
    accumulate: int = 1
    scale_lag: int = 0
    rounds: bool = False
    tiles: bool = False
    temporaries: dict[str, dict[str, int]] = field(default_factory=dict)
    cuda_graphs: bool = False
    sizes: dict[str, SizeRange] = field(default_factory=dict)
    team: int = 1
    divided: bool = False
    apart: bool = False

    @property
    def sums_in_team(self) -> bool:
        """Whether the members of a team add up gradients of what all of them hold; where they hold no parts, either,
        they are like replicas."""
        return self.divided and self.apart

    @property
    def replicas(self) -> int:
        return len(self.lanes) // self.lanes_of_copy if self.lanes else 1

    @property
    def lanes_of_copy(self) -> int:
        """The number of lanes one after the other that together hold one copy of all weights."""
        return self.shards * self.team if self.divided else self.shards

    @property
    def lanes_beside(self) -> int:
        """The number of lanes one after the other that are a team, share stages, or both."""
        return max(self.lanes_of_copy, self.team)

    @property
    def total_micro_batches(self) -> int:
        """The different micro-batches of all lanes together."""
        return sum(self.lane_micro_batches[:: self.team]) or self.micro_batches * self.teams

    @property
    def teams(self) -> int:
        """The number of teams; without teams, of lanes."""
        return max(1, len(self.lanes)) // self.team

    def has_parts(self, stage: str) -> bool:
        """Whether members of a team hold parts of a stage's parameters, each its own."""
        return any(isinstance(param.part, TeamPart) for param in self.stages[stage].params)

    def micro_batches_of(self, lane: int) -> int:
        """The number of micro-batches that a lane runs."""
        return self.lane_micro_batches[lane] if self.lane_micro_batches else self.micro_batches

    def first_micro_batch(self, lane: int) -> int:
        """The number of a lane's first micro-batch in the whole batch; those of a lane are neighbours."""
        return sum(self.micro_batches_of(other) for other in range(0, lane - lane % self.team, self.team))

    @property
    def smaller_shares(self) -> list[int]:
        """The numbers of micro-batches of lanes that have fewer than others, the largest first."""
        return sorted(set(self.lane_micro_batches) - {max(self.lane_micro_batches, default=0)}, reverse=True)

    @property
    def mini_batches(self) -> int:
        """The number of updates of each stage in a step."""
        return self.micro_batches // self.accumulate if self.asynchronous else 1

    @property
    def micro_batches_of_update(self) -> int:
        """The micro-batches, of all lanes together, whose gradients an update takes."""
        return self.total_micro_batches // self.mini_batches

    @property
    def world_size(self) -> int:
        """Devices of the machine that take part."""
        return self.num_devices * max(1, len(self.lanes))

    def speaks(self, device: int) -> bool:
        """Whether a device is the first of its team, whose members all return the same."""
        return self.number_in_team(device) == 0

    def number_in_team(self, device: int) -> int:
        """A device's number among the members of its team, once groups have members; 0 without a team."""
        teams = (self.members(name) for name in self.groups if name.startswith(f"{names.TEAM}."))
        return next((members.index(device) for members in teams if device in members), 0)

    def size(self, group: str) -> int:
        """The number of devices in a group."""
        if self.lanes and group == names.TEAM:
            return self.team
        if self.lanes and group in names.MESH_GROUPS:
            return self.shards if group == names.SHARDS else self.replicas
        return len(self.members(group))

    def state_bytes(self, spec: StageSpec) -> int:
        """Bytes of a stage's optimizer states."""
        if not self.states:
            return int(self.state_bytes_per_param * spec.trained_params)
        return self.states[self._key_of(spec)]

    def temporary_bytes(self, spec: StageSpec, memory: str) -> int:
        """Bytes that the optimizer's own step of a stage takes in a memory while it runs."""
        return self.temporaries[memory][self._key_of(spec)] if memory in self.temporaries else 0

    def _key_of(self, spec: StageSpec) -> str:
        """The key of a stage, or of a shard of it."""
        is_whole = self.shards == 1 or spec.trained_params == self.stages[spec.name].trained_params
        return spec.name if is_whole else shard_key(spec.name, self.shards)

    def master_bytes(self, spec: StageSpec) -> int:
        """Bytes of a stage's fp32 masters; 0 if there are none."""
        return MASTER_BYTES * spec.trained_params if self.master else 0

    def update_bytes(self, spec: StageSpec, memory: str, converted: bool, share: float = 1.0) -> int:
        """Bytes that an update of a share of a stage takes in a memory while it runs: fp32 gradients where they are
        `converted`, and fp32 weights where the result is rounded; of tiles, where it is made in these."""
        elements = round(share * spec.trained_params)
        if self.tiles and memory == names.DRAM:
            elements = min(elements, TILED_ELEMENTS)
        elif self.rounds:
            largest = max((p.numel for p in spec.params if p.requires_grad), default=0)
            elements = min(elements, ROUNDED_ELEMENTS + largest)
        return MASTER_BYTES * elements * (converted + self.rounds)

    def optimizer_bytes(self, spec: StageSpec) -> int:
        """Bytes that the optimizer keeps of a stage: masters and states."""
        return self.master_bytes(spec) + self.state_bytes(spec)

    def states_bytes(self, spec: StageSpec) -> int:
        """Bytes of a buffer for a stage's masters and states, with room to align those of each parameter, of which a
        shard may have pieces of all."""
        count = self.stages.get(spec.name, spec).trained_count
        return aligned(self.optimizer_bytes(spec) + STATE_ROOM * count, PAGE) if count else 0

    def all_bytes(self, spec: StageSpec) -> int:
        """Bytes of a buffer for a stage's weights and, after them, its masters and states."""
        return aligned(spec.weight_bytes, PAGE) + self.states_bytes(spec)

    def update_ranges(self, spec: StageSpec, group: str = "") -> tuple[tuple[int, int], ...]:
        """The ranges of a stage's "all" that an update reads and writes, in whole pages: trained weights, masters and
        states. The rest is frozen. Of a shard, which has pieces of all parameters, it is everything."""
        if group or all(param.requires_grad for param in spec.params):
            return ((0, self.all_bytes(spec)),)
        found: list[tuple[int, int]] = []
        for index, param in enumerate(spec.params):
            if param.requires_grad:
                begin, end = spec.part_bytes(index), spec.part_bytes(index) + param.bytes
                found.append((begin // PAGE * PAGE, aligned(end, PAGE)))
        found.append((aligned(spec.weight_bytes, PAGE), self.all_bytes(spec)))
        joined = found[:1]
        for begin, end in found[1:]:
            if begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((begin, end))
        return tuple((begin, end) for begin, end in joined if end > begin)

    def updated_bytes(self, spec: StageSpec, group: str = "") -> int:
        """Bytes of a stage's "all" that an update reads and writes."""
        return sum(end - begin for begin, end in self.update_ranges(spec, group))

    def copied_to_undo(self, spec: StageSpec, states: str = "") -> int:
        """Bytes that a speculative step copies before it changes them: master weights and optimizer states. `states`:
        the kind of value in which these come from SSD. Their file has a second slot, so of such a stage at most weights
        in DRAM that are the masters are copied."""
        if states:
            return 0 if self.master or states == "all" else spec.weight_bytes
        weights = sum(param.bytes for param in spec.params if param.requires_grad)  # which are stepped without masters
        return self.state_bytes(spec) + (self.master_bytes(spec) or weights)

    def masters_say_all(self, spec: StageSpec) -> bool:
        """Whether all weights follow from masters; a frozen parameter has no master, so its weight must be read."""
        return self.master and all(param.requires_grad for param in spec.params)

    def members(self, group: str) -> list[int]:
        """The devices of a group, each once, in its order."""
        return list(dict.fromkeys(device for device, _, _ in self.groups[group]))

    def adding(self, group: str) -> tuple[tuple[int, str, str], ...]:
        """The members whose values a sum over the group adds up. Devices that run a stage in turn have its sum already
        when a parameter that it shares with other stages is added up: the first of them adds, all take the result."""
        first: dict[str, int] = {}
        rows = self.groups[group]
        return tuple(row for row in rows if not row[2] or first.setdefault(row[1], row[0]) == row[0])

    def part_of(self, stage: str, group: str) -> StageSpec:
        """The stage as a member of the group keeps it: whole if there is no group, else a shard."""
        spec = self.stages[stage]
        return spec.shard(self.size(group)) if group else spec

    def segments_of(self, stage: str, group: str) -> tuple[Segment, ...]:
        """The layout of a stage that is spread over the group."""
        return self.stages[stage].segments(self.size(group))

    def gathered_bytes(self, stage: str, group: str) -> int:
        """Bytes of a stage's weights once they are gathered over the group."""
        return self.size(group) * self.part_of(stage, group).weight_bytes

    def grad_bytes(self, stage: str, spread: str = "") -> int:
        """Bytes of a stage's gradients; if they will be scattered over the group `spread`, in the layout for that."""
        return self.size(spread) * self.part_of(stage, spread).grad_bytes if spread else self.stages[stage].grad_bytes

    def check_batch(
        self, batch: Mapping[str, Tensor], names: Sequence[str], micro_batches: int | None = None
    ) -> None:
        """Raises `BatchError` where an input among `names` is missing or is not what was compiled. `micro_batches`: the
        number of them in the batch; default: those of one lane."""
        count = self.micro_batches if micro_batches is None else micro_batches
        for name in names:
            want, found = self.batch[name], batch.get(name)
            shape = (want.shape[0] * count, *want.shape[1:])
            if found is None:
                raise BatchError(f"batch: {name!r} is missing; found {', '.join(batch) or 'nothing'}")
            dtype = str(found.dtype).removeprefix("torch.")
            if (tuple(found.shape), dtype) != (shape, want.dtype):
                raise BatchError(
                    f"batch: {name!r} is {dtype}{list(found.shape)}, compiled for {want.dtype}{list(shape)}"
                )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Interface:
        """The interface that `to_json` wrote. Raises `Unreadable` for text that is none.

        What is used as more than a value is checked: names of stages become names of files, dtypes are looked up in
        torch, numbers of devices are counted up to.
        """
        try:
            found = _document().validate_json(text, strict=True)
        except pydantic.ValidationError as error:
            raise Unreadable(plain_errors(error)) from error
        wrong = next(_contradictions(found), None)
        if wrong is not None:
            raise Unreadable(wrong)
        return found


def shard_key(stage: str, shards: int) -> str:
    """The key in `Interface.states` of one of that many shards of a stage."""
    return f"{stage}/{shards}"


@functools.cache
def _document() -> pydantic.TypeAdapter[Interface]:
    return pydantic.TypeAdapter(Interface)


def _contradictions(interface: Interface) -> Iterator[str]:
    counts = {
        "num_devices": interface.num_devices,
        "micro_batches": interface.micro_batches,
        "shards": interface.shards,
        "team": interface.team,
        "accumulate": interface.accumulate,
    }
    yield from (f"{name} is {count}" for name, count in counts.items() if not 0 < count <= MOST)
    if len(interface.stages) > MOST:
        yield f"it has {len(interface.stages)} stages"
    for name, spec in interface.stages.items():
        yield from _wrong_stage(interface, name, spec)
    yield from (f"the batch's {found}" for found in _wrong_rows(interface.batch.values()))
    yield from (f"the batch's {found}" for found in _wrong_sizes(interface, interface.batch.values()))
    for label, of in interface.sizes.items():
        if not label.isidentifier() or not 0 < of.least <= of.most:
            yield f"its size {label!r:.60} is {of.least} to {of.most}"
    if interface.sizes and interface.batch.get(SIZES) != sizes_spec(interface.sizes):
        yield f"its batch has no {SIZES} of {len(interface.sizes)} sizes"
    yield from wrong_parts(param for spec in interface.stages.values() for param in spec.params)
    places = range(interface.num_devices)
    for group, members in interface.groups.items():
        if any(device not in places or (stage and stage not in interface.stages) for device, stage, _ in members):
            yield f"group {group!r:.60} has a member of no stage, or none of the {interface.num_devices} devices"
    if interface.micro_batches % max(1, interface.accumulate):
        yield f"{interface.micro_batches} micro-batches are no whole number of mini-batches of {interface.accumulate}"
    yield from _wrong_lanes(interface)
    yield from _wrong_bytes(interface)


def _wrong_stage(interface: Interface, name: str, spec: StageSpec) -> Iterator[str]:
    if spec.name != name or not PLAIN_NAME.fullmatch(name):
        yield f"stage {name!r:.60} is called {spec.name!r:.60}"
    if spec.loss is not None and spec.loss not in {output.name for output in spec.outputs}:
        yield f"stage {name} has no output {spec.loss!r:.60} that could be the loss"
    for lost in {*spec.changing_buffers, *spec.repeated_buffers} - {buffer.name for buffer in spec.buffers}:
        yield f"stage {name} has no buffer {lost!r:.60} that its forward could change"
    rows: list[TensorSpec | ParamSpec] = [*spec.inputs, *spec.outputs, *spec.extra_outputs]
    rows += [*spec.params, *spec.buffers, *(exchange.result for exchange in spec.exchanges)]
    known = ("", *names.TEAM_OPS)
    odd = next((e for e in spec.exchanges if e.op not in known or e.back not in known), None)
    if odd is not None:
        yield f"stage {name} exchanges {odd.source!r:.60} by {odd.op!r:.60} and {odd.back!r:.60}"
    yield from (f"stage {name}: {found}" for found in _wrong_rows(rows))
    yield from (f"stage {name}: {found}" for found in _wrong_sizes(interface, rows))
    numbers = (value for value in vars(spec).values() if isinstance(value, int | float))
    if not all(0 <= number < math.inf for number in numbers):
        yield f"stage {name} has a cost below 0 or without end"
    if spec.staying and (interface.shards > 1 or not all(param.requires_grad for param in spec.staying)):
        yield f"stage {name} is shared, or frozen, and a part of it stays on the device"
    if any(first.stays and not second.stays for first, second in pairwise(spec.params)):
        yield f"stage {name} has parameters that stay on the device before others"
    for param in spec.params:
        calls = (*wrong_calls(param.hook), *wrong_calls(param.change))
        yield from (f"{param.name!r:.60} has a hook or a change that {found}" for found in calls)


def _wrong_lanes(interface: Interface) -> Iterator[str]:
    """The error in lanes, teams and groups that share stages."""
    lanes = interface.lanes
    devices = sorted(device for lane in lanes for device in lane)
    if lanes and devices != list(range(interface.world_size)):
        yield f"the lanes are not {len(lanes)} times {interface.num_devices} different devices"
    if max(1, len(lanes)) % interface.shards:
        yield f"{len(lanes)} lanes cannot be cut into groups of {interface.shards}"
    most, least = max(interface.team, interface.shards), min(interface.team, interface.shards)
    if lanes and (len(lanes) % interface.lanes_beside or (not interface.divided and most % least)):
        yield f"{len(lanes)} lanes in groups of {interface.shards} cannot be cut into teams of {interface.team}"
    params = [param for spec in interface.stages.values() for param in spec.params]
    divided = {param.part.members for param in params if isinstance(param.part, TeamPart)}
    if interface.lanes and divided - {interface.team}:
        yield f"members of teams of {interface.team} have parts for teams of {sorted(divided)}"
    if interface.divided != bool(divided):
        yield f"members have {'' if divided else 'no '}parts of parameters, and {interface.shards} lanes share stages"
    shares, beside = interface.lane_micro_batches, interface.lanes_beside
    if shares and (len(shares) != len(lanes) or min(shares) < 1 or max(shares) != interface.micro_batches):
        yield f"{len(lanes)} lanes have {list(shares)} micro-batches, of which the most are {interface.micro_batches}"
    elif any(len(set(shares[i : i + beside])) > 1 for i in range(0, len(shares), beside)):
        yield f"lanes of one team, or that share stages, have different numbers of micro-batches, {list(shares)}"


def _wrong_bytes(interface: Interface) -> Iterator[str]:
    """The error in the bytes of optimizers."""
    known = {key for name in interface.stages for key in (name, shard_key(name, interface.shards))}
    if interface.states.keys() - known or (interface.states and interface.stages.keys() - interface.states.keys()):
        yield "it counts optimizer states of other stages than it has"
    if min(interface.states.values(), default=0) < 0 or not 0 <= interface.state_bytes_per_param < math.inf:
        yield "it counts optimizer states that no stage has"
    for memory, found in interface.temporaries.items():
        if memory not in (names.DEVICE, names.DRAM) or found.keys() - known or interface.stages.keys() - found.keys():
            yield f"it counts what steps take in {memory!r:.60}, or of other stages than it has"
        if min(found.values(), default=0) < 0:
            yield "it counts less than nothing that a step takes"


def sizes_spec(ranges: Mapping[str, SizeRange]) -> TensorSpec:
    """The input that has the sizes of each micro-batch."""
    return TensorSpec(SIZES, (1, len(ranges)), "int64")


def _wrong_sizes(interface: Interface, rows: Iterable[TensorSpec | ParamSpec]) -> Iterator[str]:
    most = {name: of.most for name, of in interface.sizes.items()}
    for row in rows:
        if not isinstance(row, TensorSpec) or not row.dims:
            continue
        wrong = [found for dim in row.dims if dim and (found := wrong_expression(dim, most))]
        if wrong or len(row.dims) != len(row.shape):
            yield f"{row.name!r:.60} has a dimension that {wrong[0] if wrong else 'is not in its shape'}"
        elif row.shape_at(most) != row.shape:
            yield f"{row.name!r:.60} is {list(row.shape)} at most, but its dimensions make {list(row.shape_at(most))}"


def _wrong_rows(rows: Iterable[TensorSpec | ParamSpec]) -> Iterator[str]:
    for row in rows:
        dtypes = (row.dtype, row.grad_dtype) if isinstance(row, ParamSpec) else (row.dtype,)
        wrong = [dtype for dtype in dtypes if not isinstance(getattr(torch, dtype, None), torch.dtype)]
        if wrong:
            yield f"{row.name!r:.60} has the dtype {wrong[0]!r:.60}"
        elif any(size < 0 for size in row.shape) or math.prod(size for size in row.shape if size) > MOST_ELEMENTS:
            yield f"{row.name!r:.60} has the shape {list(row.shape)!s:.60}"
        elif isinstance(row, TensorSpec) and row.order and sorted(row.order) != list(range(len(row.shape))):
            yield f"{row.name!r:.60} has the order {list(row.order)!s:.60}"
