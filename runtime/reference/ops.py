"""The ops of the reference runtime: the meaning of each, on plain tensors of one process.

`ReferenceRuntime` has one method per op; `World` is what the devices share. `run.py` runs programs with them.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import BatchError, VerifyError
from ...ir.ops import shared_params, split_by_sharing
from ...ir.program import Interface, TeamPart, holders, sizes_of
from ..experts.routes import Arrivals, SumsOfTokens
from ..optimizer.extrapolate import extrapolate
from ..optimizer.gradients import (
    Grads,
    LossScale,
    LossScales,
    clip_factor,
    must_redo,
    speculative_factor,
    sum_of_squares,
)
from ..optimizer.hooks import run_hooks
from ..stage.draws import evaluation_seed, micro_batch_seed
from ..stage.kept import Kept
from ..stage.runner import StageRunner
from ..stage.shards import piece_of, whole_of
from ..stage.split_backward import Rest
from .stage import ReferenceStage


@dataclass
class Weights:
    """A stage's parameters as a program's value: the resident ones, or a fetched copy."""

    stage: str
    tensors: dict[str, Tensor]


@dataclass
class Shard:
    """One member's piece of each of a stage's parameters, as a program's value."""

    stage: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class States:
    """A stage's optimizer states and masters ("states"), or all that persists of it ("all"), as a program's value."""

    stage: str
    kind: str


@dataclass
class StageGrads(Grads):
    """A stage's gradients as a program's value; after a scatter, those of one shard."""

    stage: str = ""


class Waiting(Exception):
    """The device cannot go on yet; the text says what it waits for."""


@dataclass
class World:
    """The state that the devices share: stages, seeds, and the values under way between them.

    `stages` has each stage on the first device that holds it, `replicas` (by device and name) on the others.
    """

    interface: Interface
    stages: dict[str, ReferenceStage]
    seed: int
    step: int = 0
    evaluations: int = 0  # since the last step
    loss_scale: LossScale | None = None
    scales: LossScales | None = None  # in an asynchronous step
    finite: bool = True
    replicas: dict[tuple[int, str], ReferenceStage] = field(default_factory=dict)
    mail: dict[tuple[int, int, str], deque[Tensor]] = field(default_factory=dict)
    arrived: dict[tuple[str, int], dict[int, tuple[Any, ...]]] = field(default_factory=dict)

    def stage(self, device: int, name: str) -> ReferenceStage:
        return self.replicas.get((device, name)) or self.stages[name]


class ReferenceRuntime:
    """The ops of one device, under their own names and signatures. `recv` and collectives raise `Waiting`."""

    def __init__(self, device: int, world: World):
        self.device = device
        self.world = world
        self._calls = defaultdict[str, Iterator[int]](itertools.count)  # what was done of each mini-batch, in turn
        self._meetings: dict[str, int] = {}  # per group, the number of collectives that this device has done

    def load(self, batch: dict[str, Tensor], name: str, *, micro_batch: int) -> Tensor:
        spec, count = self.world.interface.batch[name], self.world.interface.micro_batches
        if name not in batch:
            raise BatchError(f"the batch lacks {name!r}; it has {', '.join(batch) or 'nothing'}")
        rows, rest = divmod(batch[name].shape[0], count)
        part = batch[name][micro_batch * rows : (micro_batch + 1) * rows]
        if spec.dims and part.shape == spec.shape:
            sizes = sizes_of(self.world.interface.sizes, batch)[micro_batch]
            return part[spec.part_at(sizes)].detach()
        found = (tuple(part.shape), str(part.dtype).removeprefix("torch."))
        if rest or found != (spec.shape, spec.dtype):
            whole = [spec.shape[0] * count, *spec.shape[1:]]
            raise BatchError(
                f"{name!r} is {batch[name].dtype}{list(batch[name].shape)}, compiled for {spec.dtype}{whole}"
            )
        return part.detach()

    def resident(self, name: str, *, group: str | None = None) -> Weights | Shard:
        stage = name.removesuffix(".weights")
        return (Weights if group is None else Shard)(stage, self.world.stage(self.device, stage).weights)

    def fetch(
        self,
        what: Any,
        begun: Weights | None = None,
        *,
        params: int | None = None,
        group: str | None = None,
        link_turn: int | None = None,
    ) -> Any:
        if isinstance(what, Tensor | Kept):
            return self.offload(what)
        stage = what.stage if isinstance(what, Weights) else what.removesuffix(".weights")
        state = self.world.stage(self.device, stage)
        if group is not None:
            return Shard(stage, state.copy_weights(list(state.weights)))
        there = begun.tensors if begun is not None else {}
        spec = self.world.interface.stages[stage]
        copies = state.copy_weights([p.name for p in spec.moving[:params] if p.name not in there])
        return Weights(stage, {**there, **copies, **{p.name: state.weights[p.name] for p in spec.staying}})

    def offload(self, value: StageGrads | Tensor | Kept) -> StageGrads | Tensor | Kept:
        if isinstance(value, Tensor):
            return value.clone()
        if isinstance(value, Kept):
            return Kept.partial({name: t.clone() for name, t in value.tensors.items()}, value.aside)
        return StageGrads({name: g.clone() for name, g in value.tensors.items()}, value.factor, value.stage)

    def read(self, what: Any, *, group: str | None = None) -> Any:
        if not isinstance(what, str):
            return self.offload(what)
        stage, _, kind = what.partition(".")
        if kind == "weights":
            state = self.world.stage(self.device, stage)
            return Weights(stage, state.copy_weights(list(state.weights)))
        return States(stage, kind)

    def write(self, value: Any, *, to: str | None = None) -> Any:
        """States stay where they are, as one memory holds everything here; other values are copied."""
        return None if to is not None else self.offload(value)

    def free(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, Weights):
                self.world.stage(self.device, value.stage).runner.release()
            elif isinstance(value, Kept | Rest):
                value.drop()

    def forward(
        self, stage: str, weights: Weights, *inputs: Tensor, micro_batch: int, keep: bool | Sequence[str] = True
    ) -> tuple[Any, ...]:
        runner = self._bound(stage, weights)
        runner.prepare_buffers(self.world.step)
        outputs, kept = runner.forward(inputs, self._seed(micro_batch), keep)
        return (*outputs, kept) if keep else tuple(outputs)

    def evaluate(self, stage: str, weights: Weights, *inputs: Tensor, micro_batch: int) -> tuple[Tensor, ...]:
        evaluation, runner = (self.world.step, self.world.evaluations), self._bound(stage, weights)
        runner.prepare_buffers(evaluation)
        return tuple(runner.evaluate(inputs, evaluation_seed(self.world.seed, *evaluation, micro_batch)))

    def backward(
        self, stage: str, weights: Weights, kept: Kept | None, inputs: list[Tensor | None],
        douts: list[Tensor | float | None], grads: StageGrads | None = None, *, micro_batch: int,
        unpack_once: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        runner = self._bound(stage, weights)
        scale = self._loss_scale(f"backward of {stage}", self.world.interface.accumulate)
        scaled = [dout * scale if isinstance(dout, float) else dout for dout in douts]
        held = None if grads is None else grads.tensors
        seed = self._seed(micro_batch)
        dinputs, sums = runner.backward(kept, inputs, scaled, held, seed, unpack_once=unpack_once)
        return (*dinputs, StageGrads(sums, stage=stage))

    def backward_input(
        self, stage: str, weights: Weights, kept: Kept | None, inputs: list[Tensor | None],
        douts: list[Tensor | float | None], *, micro_batch: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        scale = self.world.loss_scale.scale if self.world.loss_scale else 1.0
        scaled = [dout * scale if isinstance(dout, float) else dout for dout in douts]
        runner, seed = self._bound(stage, weights), self._seed(micro_batch)
        dinputs, rest = runner.backward_input(kept, inputs, scaled, seed)
        return (*dinputs, rest)

    def backward_weight(
        self, stage: str, weights: Weights, rest: Rest, grads: StageGrads | None = None, *, micro_batch: int
    ) -> StageGrads:
        held = None if grads is None else grads.tensors
        return StageGrads(self._bound(stage, weights).backward_weight(rest, held), stage=stage)

    def add(self, left: Any, right: Any) -> Any:
        if isinstance(left, Tensor):
            return left.add_(right)
        for name, grad in left.tensors.items():
            grad += right.tensors[name]
        return left

    def send(self, value: Tensor, *, dst: int, tag: str) -> None:
        box = self.world.mail.setdefault((self.device, dst, tag), deque())
        box.append(value.clone(memory_format=torch.contiguous_format))

    def recv(self, like: str, *, src: int, tag: str) -> Tensor:
        box = self.world.mail.get((src, self.device, tag))
        if not box:
            raise Waiting(f"waits for device {src} to send {tag!r}")
        value = box.popleft()
        stage, _, output = like.partition(".")
        spec = self.world.interface.stages[stage].output(output)
        fits = len(spec.dims) == value.dim() or tuple(value.shape) == spec.shape
        if not fits or str(value.dtype) != f"torch.{spec.dtype}":
            raise VerifyError(f"{tag!r} brings {value.dtype}{list(value.shape)}, not a {like}", device=self.device)
        return value

    def all_reduce(self, *values: Any, group: str, parts: bool = True) -> tuple[Any, ...]:
        arrived = self._meet(group, values)
        members, adding = self.world.interface.groups[group], self.world.interface.adding(group)
        own = [name for device, _, name in members if device == self.device]
        if isinstance(values[0], StageGrads) and own == [""]:
            found = self._sum_gradients(arrived, group) | ({} if parts else self._parts_of(values[0]))
            return (StageGrads(found, stage=values[0].stage),)
        total = arrived.setdefault(-1, (_sum_of_members(members, adding, arrived),))[0]
        for name, value in zip(own, values):
            if isinstance(value, Grads) and total is not None:
                value.tensors[name] = total.clone()
        return tuple(v if isinstance(v, Grads) else total.clone() for v in values)

    def _parts_of(self, grads: StageGrads) -> dict[str, Tensor]:
        """The gradients of parameters of which this device has its own part."""
        params = self.world.interface.stages[grads.stage].params
        names = {param.name for param in params if isinstance(param.part, TeamPart)}
        return {name: grad for name, grad in grads.tensors.items() if name in names}

    def all_gather(self, shard: Shard, *, group: str, hierarchical: bool = False) -> Weights:
        arrived = self._meet(group, (shard,))
        shards = [arrived[device][0].tensors for device in self.world.interface.members(group)]
        params = self.world.interface.stages[shard.stage].params
        return Weights(shard.stage, {p.name: whole_of([s[p.name] for s in shards], p.shape) for p in params})

    def reduce_scatter(
        self, grads: StageGrads, total: StageGrads | None = None, *, group: str, hierarchical: bool = False,
        whole: bool = False,
    ) -> StageGrads:  # fmt: skip
        devices = self.world.interface.members(group)
        summed = self._sum_gradients(self._meet(group, (grads,)), group)
        index = devices.index(self.device)
        pieces = {name: piece_of(g, index, len(devices)) for name, g in summed.items()}
        if total is None:
            return StageGrads(pieces, stage=grads.stage)
        for name, piece in pieces.items():
            total.tensors[name] += piece
        return total

    def member(self, *, group: str) -> Tensor:
        return torch.tensor([self.world.interface.members(group).index(self.device)])

    def all_to_all(self, value: Tensor, *, group: str, split_dim: int, concat_dim: int) -> Tensor:
        values, own = self._values_of_members(value, group)
        return torch.cat([v.chunk(len(values), split_dim)[own] for v in values], concat_dim)

    def gather_parts(self, value: Tensor, *, group: str, dim: int) -> Tensor:
        return torch.cat(self._values_of_members(value, group)[0], dim)

    def scatter_sum(self, value: Tensor, *, group: str, dim: int) -> Tensor:
        values, own = self._values_of_members(value, group)
        return functools.reduce(torch.add, [v.chunk(len(values), dim)[own] for v in values]).contiguous()

    def sum_parts(self, value: Tensor, *, group: str) -> Tensor:
        return functools.reduce(torch.add, self._values_of_members(value, group)[0])

    def own_part(self, value: Tensor, *, group: str, dim: int) -> Tensor:
        members = self.world.interface.members(group)
        return value.chunk(len(members), dim)[members.index(self.device)].clone()

    def pass_on(self, value: Tensor, *, group: str, back: bool = False) -> Tensor:
        values, own = self._values_of_members(value, group)
        return values[(own + (1 if back else -1)) % len(values)].clone()

    def to_experts(self, value: Tensor, routes: Tensor, *, group: str, experts: int) -> Tensor:
        values, own = self._values_of_members(value, group)
        arrivals = Arrivals(routes, own, len(values), experts)
        arrived = torch.cat(values)[arrivals.comes][arrivals.tokens]
        made = value.new_zeros((routes.numel(), *value.shape[1:]))
        made[: len(arrived)] = arrived
        return made

    def from_experts(self, value: Tensor, routes: Tensor, *, group: str, experts: int) -> Tensor:
        values, own = self._values_of_members(value, group)
        made = SumsOfTokens(value, routes.shape[0] // len(values))
        for member, rows in enumerate(values):
            arrivals = Arrivals(routes, member, len(values), experts)
            made.add(arrivals.tokens_from(own), arrivals.sums(rows).split(arrivals.counts)[own])
        return made.whole()

    def _values_of_members(self, value: Tensor, group: str) -> tuple[list[Tensor], int]:
        """The values that the members of a group bring, in its order, and this device's number among them."""
        arrived, members = self._meet(group, (value,)), self.world.interface.members(group)
        return [arrived[device][0] for device in members], members.index(self.device)

    def _meet(self, group: str, values: tuple[Any, ...]) -> dict[int, tuple[Any, ...]]:
        """The values that all devices of a group bring to its next collective, by device."""
        turn = (group, self._meetings.get(group, 0))
        arrived = self.world.arrived.setdefault(turn, {})
        arrived.setdefault(self.device, values)
        missing = sorted(set(self.world.interface.members(group)) - arrived.keys())
        if missing:
            raise Waiting(f"waits for device {', '.join(map(str, missing))} to meet in {group!r}")
        self._meetings[group] = turn[1] + 1
        return arrived

    def _sum_gradients(self, arrived: Mapping[int, tuple[Any, ...]], group: str) -> dict[str, Tensor]:
        """A stage's gradients, added up in the group's order, without names that no device has."""
        total: dict[str, Tensor] = {}
        for device in self.world.interface.members(group):
            for name, grad in arrived[device][0].tensors.items():
                total[name] = total[name] + grad if name in total else grad.clone()
        return total

    def norm(self, *grads: StageGrads) -> Tensor:
        interface = self.world.interface
        parts = ((interface.stages[part.stage], part.tensors) for part in grads)
        return sum_of_squares(parts, holders(interface, self.device))

    def hook(self, grads: StageGrads) -> StageGrads:
        scale = self.world.loss_scale.scale if self.world.loss_scale else 1.0
        run_hooks(self.world.interface.stages[grads.stage].params, grads.tensors, scale)
        return grads

    def clip(self, grads: StageGrads, norm: Tensor, *, max_norm: float) -> StageGrads:
        grads.scale(clip_factor(norm, max_norm, self._loss_scale(f"clip of {grads.stage}")))
        return grads

    def _loss_scale(self, call: str, each: int = 1) -> float:
        """The loss scale of this step; of an asynchronous one, that of the mini-batch whose turn it is, of which there
        are `each` calls of this kind."""
        number = next(self._calls[call]) // each
        if self.world.scales is not None:
            return self.world.scales.scale_of(number)
        return self.world.loss_scale.scale if self.world.loss_scale else 1.0

    def step(
        self, stage: str, grads: StageGrads, norm: Tensor | None = None, states: States | None = None,
        *, speculative: bool = False,
    ) -> States | None:  # fmt: skip
        state, scale = self.world.stage(self.device, stage), self.world.loss_scale
        state.begin_update(self.world.seed, self.world.step, grads.part)
        if scale is not None and norm is None and not speculative:
            raise VerifyError(f"fp16 gradients of {stage} reach `step` without their norm", device=self.device)
        finite = norm is None or bool(torch.isfinite(norm))
        if norm is not None and self.world.scales is not None:
            self.world.scales.note(state.draw[-1], finite)
        if not finite:
            self.world.finite = False
        elif speculative:
            state.before = state.optimizer.snapshot() if state.optimizer is not None else None
            state.step(grads.with_factor(speculative_factor(1.0 if scale is None else scale.scale)))
        else:
            state.step(grads)
        return states

    def redo(self, stage: str, grads: StageGrads, norm: Tensor, *, max_norm: float) -> None:
        state, scale = self.world.stage(self.device, stage), self.world.loss_scale
        loss_scale = 1.0 if scale is None else scale.scale
        if state.optimizer is None or not must_redo(norm, max_norm, loss_scale):
            return
        state.restore()
        if scale is not None and not bool(torch.isfinite(norm)):
            self.world.finite = False
            return
        state.step(grads.with_factor(clip_factor(norm, max_norm, loss_scale)))

    def stash(self, stage: str, weights: Weights) -> Weights:
        state = self.world.stage(self.device, stage)
        return Weights(stage, state.copy_weights(list(state.weights)))

    def predict(self, stage: str, weights: Weights, *, updates: int, shared: int = 0) -> Weights:
        made, optimizer = self.stash(stage, weights), self.world.stage(self.device, stage).optimizer
        if optimizer is not None:
            extrapolate(optimizer, made.tensors, updates, shared, shared_params(self.world.interface, stage))
        return made

    def split(self, stage: str, grads: StageGrads) -> tuple[StageGrads, StageGrads]:
        own, shared = split_by_sharing(grads.tensors, shared_params(self.world.interface, stage))
        return StageGrads(own, stage=stage, part="own"), StageGrads(shared, stage=stage, part="shared")

    def _bound(self, stage: str, weights: Weights) -> StageRunner:
        runner = self.world.stage(self.device, stage).runner
        runner.bind(weights.tensors)
        return runner

    def _seed(self, micro_batch: int) -> int:
        return micro_batch_seed(self.world.seed, self.world.step, micro_batch)


def _sum_of_members(
    members: Sequence[tuple[int, str, str]],
    adding: Sequence[tuple[int, str, str]],
    arrived: Mapping[int, tuple[Any, ...]],
) -> Tensor | None:
    """The sum over a group of the members that add: first on one device, then over devices, both in the group's
    order."""
    total: Tensor | None = None
    for device in dict.fromkeys(device for device, _, _ in members):
        local: Tensor | None = None
        for member, value in zip([row for row in members if row[0] == device], arrived[device]):
            part = value.tensors.get(member[2]) if isinstance(value, Grads) else value
            if part is not None and member in adding:
                local = part.clone() if local is None else local.add_(part)
        if local is not None:
            total = local if total is None else total.add_(local)
    return total
