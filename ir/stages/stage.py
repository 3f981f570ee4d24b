"""A stage as programs know it: inputs, outputs, parameters, costs. Its code is in the generated file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from ..machine.call_mix import NO_CALLS, CallMix
from .flat import Segment, segments_of
from .hooks import HookCall
from .sizes import Sizes, value_of

HOOK_PORTION_ELEMENTS = 1 << 18  # of a gradient, on which a hook works at once
PAGE = 4096  # data in DRAM or on SSD begins at a multiple of it, so that disks read and write it in place
STATE_ROOM = 256  # bytes a parameter, to align its master and its states


@dataclass(frozen=True)
class TensorSpec:
    """One tensor at the border of a stage.

    `order`: its dimensions from the outermost in memory to the innermost, empty where memory has them as they are
    numbered. A stage gets its inputs laid out so, as torch on a CPU draws random numbers in the order of memory.
    `dims`: for each dimension the expression of named sizes that it is, or "" where it never changes; empty where none
    does. `shape` has the most that each may be.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "float32"
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    dims: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    def shape_at(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in a micro-batch of these sizes."""
        if not self.dims:
            return self.shape
        return tuple(value_of(dim, sizes) if dim else size for dim, size in zip(self.dims, self.shape, strict=True))

    def with_sizes(self, sizes: Sizes) -> TensorSpec:
        """The tensor in a micro-batch of these sizes."""
        return replace(self, shape=self.shape_at(sizes))

    def part_at(self, sizes: Sizes) -> tuple[slice, ...]:
        """The place of a value of these sizes in a tensor of the largest shape."""
        return tuple(map(slice, self.shape_at(sizes)))


@dataclass(frozen=True)
class RowPart:
    """Rows `begin` to `end` of a parameter of the model, which has `total` rows: a parameter of its own in stages."""

    parameter: str  # the user's own dotted name
    begin: int
    end: int
    total: int

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class TeamPart:
    """The part of a model's parameter that each member of a team has: of its dimension `dim`, seen as (blocks, members,
    n), the places with the member's number. A parameter of its own in stages, of one shape for all members."""

    parameter: str  # the user's own dotted name
    dim: int
    members: int
    blocks: int = 1


@dataclass(frozen=True)
class ParamSpec:
    """One parameter or buffer of a stage, under the user's own dotted name, or a part of a parameter.

    `dtype` is that of the computation; `owner` is False if another stage counts and saves this tied parameter, and
    `shared` says that other stages have it at all; `hook` is what the user's gradient hooks do to its gradient, once
    that is complete, `change` what forward does in place to the parameter itself, which lasts. A buffer without an
    owner is a constant: a tensor that the model uses but does not register, whose value is the programs'. `sum_dtype`:
    in which gradients are added up, if not in `dtype`.
    `tied_to`: the first name in the model, if that is another one. `stays`: it is on the device, with its masters and
    states, also where the rest of its stage is fetched.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    owner: bool = True
    hook: tuple[HookCall, ...] = ()
    change: tuple[HookCall, ...] = ()
    part: RowPart | TeamPart | None = None
    sum_dtype: str = ""
    shared: bool = False
    tied_to: str = ""
    stays: bool = False

    @property
    def whole_name(self) -> str:
        """The name of the parameter of the model that this is, or is a part of, or a piece of a part."""
        return self.name if self.part is None else self.part.parameter

    @property
    def whole(self) -> ParamSpec:
        """The parameter of the model that this is, or is a part of."""
        if self.part is None:
            return self
        total = self.part.total if isinstance(self.part, RowPart) else self.shape[self.part.dim] * self.part.members
        dim = 0 if isinstance(self.part, RowPart) else self.part.dim
        shape = (*self.shape[:dim], total, *self.shape[dim + 1 :])
        return replace(self, name=self.part.parameter, shape=shape, part=None)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        return self.numel * dtype_bytes(self.dtype)

    @property
    def grad_dtype(self) -> str:
        """The type of its gradient, from the first micro-batch on."""
        return self.sum_dtype or self.dtype

    @cached_property
    def grad_bytes(self) -> int:
        return self.numel * dtype_bytes(self.grad_dtype)


@dataclass(frozen=True)
class SavedSpec:
    """A class of saved tensors: the output of one costly call in a stage's forward, for one micro-batch.

    If it is kept, rematerialisation saves its `flops`. `calls`: which of the stage's costly calls it is, counted from 0
    in the order in which they run. `is_saved`: autograd saves it, too, so it is part of the stage's `kept_bytes`.
    """

    name: str
    bytes: int
    flops: float
    calls: tuple[int, ...]
    is_saved: bool = False


@dataclass(frozen=True)
class Exchange:
    """The exchange of a value among the members of a team: `result` of the value `source`, by the op `op` of
    `ir/ops/team.py` with the fields `fields`, and the gradient of `source` of that of `result` by `back` and
    `back_fields`. Without an op the value, or its gradient, is the other one as it is. `routes`: the exchanged value
    that both ops take beside it, of an exchange by count. `lasts`: members keep what goes round a ring until backward,
    in place of sending it round again."""

    result: TensorSpec
    source: str
    op: str = ""
    fields: tuple[tuple[str, int], ...] = ()
    back: str = ""
    back_fields: tuple[tuple[str, int], ...] = ()
    routes: str = ""
    lasts: bool = False


@dataclass(frozen=True)
class AgainSpec:
    """A rematerialisation that leaves out what backward needs nothing of, such as the forward of a reference.

    `inputs`: the names of those that only this reads; backward takes None in their place. `calls`: the costly calls of
    forward that are not made, as `SavedSpec.calls` counts. The rest is what is run again costs.
    """

    inputs: tuple[str, ...]
    calls: tuple[int, ...]
    flops: float
    traffic_bytes: float
    mix: CallMix
    launches: int
    workspace_bytes: int


@dataclass(frozen=True)
class UnpackedSpec:
    """The costs of a backward that runs forward again, where this forward keeps the quantised weights that it unpacks.

    `traffic_bytes` and `mix` are of backward alone; `workspace_bytes` has all that forward saves, too.
    """

    traffic_bytes: float
    mix: CallMix
    workspace_bytes: int


@dataclass(frozen=True)
class StageSpec:
    """The interface and the measured or inferred costs of one stage, for one micro-batch.

    `outputs` are the values that later stages, or the step's result, need; `extra_outputs` exist in evaluation only.
    `kept_bytes` is what backward needs beyond inputs and parameters; workspaces are what an op takes while it runs and
    gives back. `traffic` is bytes read and written in the device's own memory, for the roofline.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]
    buffers: tuple[ParamSpec, ...] = ()
    extra_outputs: tuple[TensorSpec, ...] = ()
    loss: str | None = None  # the name of the output that is the loss
    kept_bytes: int = 0
    forward_workspace_bytes: int = 0
    light_workspace_bytes: int = 0  # of a forward that keeps nothing
    backward_workspace_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_traffic_bytes: float = 0.0
    backward_traffic_bytes: float = 0.0
    forward_mix: CallMix = NO_CALLS  # the calls of these sums, for a device whose rates depend on their sizes
    backward_mix: CallMix = NO_CALLS
    rematerialisable: bool = True  # False where a second forward would not repeat the first exactly
    draws: bool = False  # whether it draws random numbers in training
    changing_buffers: tuple[str, ...] = ()  # buffers that its forward writes
    repeated_buffers: tuple[str, ...] = ()  # changing buffers that are alike before each micro-batch of a step
    pointwise_again: bool = False  # whether backward computes pointwise results again (`recompute-pointwise`)
    title: str = ""  # what it holds, for people: "transformer.h.3 to h.5"
    launches: int = 0  # torch calls in one forward, for the launch overhead of the cost model
    seconds: tuple[tuple[str, float, float, float], ...] = ()  # measured: device, forward, rematerialisation, backward
    saved: tuple[SavedSpec, ...] = ()  # what can be kept, so that less is computed again
    taking: tuple[tuple[str, float], ...] = ()  # measured: device, rematerialisation with all of `saved` kept
    weight_share: float = 0.5  # the share of backward's work that only gradients of parameters need
    split_bytes: int = 0  # gradients that wait for that share if backward is split
    again: AgainSpec | None = None  # where rematerialisation is less than forward
    unpacked: UnpackedSpec | None = None  # where a forward that runs again can keep the weights that it unpacks
    exchanges: tuple[Exchange, ...] = ()  # of its outputs, after its forward, or of its inputs, before it
    handed: tuple[tuple[str, str], ...] = ()  # inputs whose gradients are those of outputs as they are, with these
    passing: tuple[str, ...] = ()  # inputs that are put into outputs as they are: backward takes None in their place

    @property
    def made(self) -> tuple[TensorSpec, ...]:
        """The values that other stages may read once it has run: its outputs, and its team's exchanges of them or of
        inputs."""
        return (*self.outputs, *(exchange.result for exchange in self.exchanges))

    @cached_property
    def backward_inputs(self) -> tuple[TensorSpec | None, ...]:
        """The inputs as backward takes them: None where it needs nothing of one."""
        unneeded = {*(self.again.inputs if self.again is not None else ()), *self.passing}
        return tuple(None if i.name in unneeded else i for i in self.inputs)

    @cached_property
    def whole_again(self) -> AgainSpec:
        """The bytes that rematerialisation saves and its cost, if no class of saved tensors is kept."""
        if self.again is not None:
            return self.again
        return AgainSpec(
            (), (), self.forward_flops, self.forward_traffic_bytes, self.forward_mix, self.launches,
            self.forward_workspace_bytes,
        )  # fmt: skip

    @property
    def is_free_again(self) -> bool:
        """Whether rematerialisation makes nothing that backward needs but what `inputs` hold: then nothing is kept."""
        return self.again is not None and not self.again.flops and self.rematerialisable and not self.draws

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters that move together in the dtype of the computation, each aligned as in its buffer."""
        return self.part_bytes(len(self.params))

    @property
    def moving(self) -> tuple[ParamSpec, ...]:
        """The parameters that a fetch brings; those that stay come after them."""
        return tuple(param for param in self.params if not param.stays)

    @cached_property
    def staying(self) -> tuple[ParamSpec, ...]:
        return tuple(param for param in self.params if param.stays)

    @property
    def staying_bytes(self) -> int:
        return sum(aligned(param.bytes) for param in self.staying)

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of all parameters, in whatever memory."""
        return self.weight_bytes + self.staying_bytes

    def part_bytes(self, num_params: int) -> int:
        return self._ends_bytes[num_params]

    @cached_property
    def _ends_bytes(self) -> tuple[int, ...]:
        """The offset of each parameter in the flat buffer, then the buffer's end; planning asks for them often."""
        return tuple(accumulate((0 if p.stays else aligned(p.bytes) for p in self.params), initial=0))

    @cached_property
    def grad_bytes(self) -> int:
        return sum(p.grad_bytes for p in self.params if p.requires_grad)

    @property
    def common_grad_bytes(self) -> int:
        """Bytes of the gradients of parameters of which members of a team have no parts of their own."""
        return sum(p.grad_bytes for p in self.params if p.requires_grad and not isinstance(p.part, TeamPart))

    @property
    def ungraphable(self) -> str:
        """The reason for which the stage cannot run from a CUDA graph; "" if it can."""
        if self.draws:
            return "it draws random numbers, and the host sets the seed of each draw"
        if self.changing_buffers:
            return "its forward changes its buffers"
        if any(param.change for param in self.params):
            return "its forward changes its weights"
        return "its backward computes pointwise results again" if self.pointwise_again else ""

    @property
    def has_hooks(self) -> bool:
        """Whether a parameter of this stage has gradient hooks."""
        return any(p.hook for p in self.params)

    @property
    def hook_bytes(self) -> int:
        """Bytes that gradient hooks take while they run, in fp32 at least."""
        return max((_working_bytes(p, p.hook) for p in self.params), default=0)

    @property
    def change_bytes(self) -> int:
        """Bytes that it takes to change parameters as forward does."""
        return max((_working_bytes(p, p.change) for p in self.params), default=0)

    def noted_buffers(self, undo: bool) -> tuple[str, ...]:
        """The buffers of which a copy is kept from before the step. `undo`: the step can be undone."""
        return self.changing_buffers if undo else self.repeated_buffers

    @property
    def constants(self) -> tuple[ParamSpec, ...]:
        """The buffers that the programs have the values of: no model and no checkpoint holds them."""
        return tuple(buffer for buffer in self.buffers if not buffer.owner)

    @property
    def model_buffers(self) -> tuple[ParamSpec, ...]:
        """The buffers that the user's model holds."""
        return tuple(buffer for buffer in self.buffers if buffer.owner)

    @cached_property
    def trained_count(self) -> int:
        """The number of parameters that are trained."""
        return sum(p.requires_grad for p in self.params)

    @cached_property
    def trained_params(self) -> int:
        return sum(p.numel for p in self.params if p.requires_grad)

    def again_s(self, device: str, whole_s: float, spared_flops: float) -> float:
        """Seconds of a rematerialisation with classes of saved tensors of `spared_flops` kept; it takes `whole_s` with
        none. For a device that was not measured with all classes kept, seconds are proportional to FLOPs."""
        if device not in dict(self.taking):
            flops = self.whole_again.flops
            return whole_s * (1.0 - spared_flops / flops if flops else 1.0)
        every_flops = sum(saved.flops for saved in self.saved)
        share = spared_flops / every_flops if every_flops else 0.0
        return whole_s - share * max(0.0, whole_s - dict(self.taking)[device])

    def segments(self, count: int) -> tuple[Segment, ...]:
        """The flat layout of the stage for `count` members of a group."""
        return self._flat(count)[0]

    def shard(self, count: int) -> StageSpec:
        """The stage as one of `count` members of a group keeps it, counted: in place of its parameters are equal slices
        of its segments."""
        return self._flat(count)[1]

    def pieces(self, count: int, index: int) -> tuple[ParamSpec, ...]:
        """The piece of each parameter that member `index` of `count` has, as one row: all of it, a piece, or nothing.
        """
        sizes = self._piece_sizes(count, index)
        return tuple(replace(param, shape=(sizes.get(param.name, 0),)) for param in self.params)

    def unlike_pieces(self, count: int) -> list[tuple[ParamSpec, ...]]:
        """The pieces of members of `count`, without parameters of which they have nothing: once for members one after
        the other who have as much of the same parameters. So its length does not grow with `count`."""
        members = {0}.union(*(segment.turning_points(count) for segment in self.segments(count)))
        sizes = (self._piece_sizes(count, index) for index in sorted(members))
        return [tuple(replace(p, shape=(own[p.name],)) for p in self.params if p.name in own) for own in sizes]

    def _piece_sizes(self, count: int, index: int) -> dict[str, int]:
        """The elements of each parameter that member `index` of `count` has, if any."""
        return {param.name: size for segment in self.segments(count) for param, size in segment.pieces_of(index)}

    def _flat(self, count: int) -> tuple[tuple[Segment, ...], StageSpec]:
        if count not in self._shards:
            segments = segments_of(self.params, count)
            self._shards[count] = segments, replace(self, params=tuple(s.slice_param for s in segments))
        return self._shards[count]

    @cached_property
    def _shards(self) -> dict[int, tuple[tuple[Segment, ...], StageSpec]]:
        return {}

    def output(self, name: str) -> TensorSpec:
        return next(o for o in (*self.made, *self.extra_outputs) if o.name == name)


def _working_bytes(param: ParamSpec, calls: tuple[HookCall, ...]) -> int:
    """Bytes of the results of these calls on one portion of a parameter, in fp32 at least."""
    portion_bytes = min(param.numel, HOOK_PORTION_ELEMENTS) * max(4, dtype_bytes(param.dtype))
    return (len(calls) + 3) * portion_bytes if calls else 0


def dtype_bytes(name: str) -> int:
    return int(getattr(torch, name).itemsize)


def aligned(num_bytes: int, alignment: int = 512) -> int:
    """Bytes rounded up so that every tensor of a flat buffer starts where copies and vector loads are fast."""
    return -(-num_bytes // alignment) * alignment
