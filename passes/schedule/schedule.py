"""Schedules: passes that decide what each device does, in which order.

In: stages on devices. Out: `draft.programs`. All weights are resident and all saved tensors kept; later passes change
that. The gradients are results of the step until `insert-optimizer` consumes them.

A value that several stages read is sent once per device. Its gradients are added on each reading device, sent back
once, and added again at the producer. A device sends in the order of its turns and receives in the order in which all
devices' turns are expected to end: one order for all messages, so no two streams can wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...ir.errors import PassError
from ...ir.ops import DEVICE, DRAM
from ...ir.precision import Precision
from ...ir.program import SIZES, Interface, ParamSpec, copies_group, shard_key, sizes_spec
from ..base import Pass, require_own
from ..decisions import SCHEDULE, STAYING, Decision
from ..draft import Draft
from ..staying import choose_staying, mark_staying
from .emitter import Emitter
from .flow import Flow, Placed


@dataclass(frozen=True)
class Schedule(Pass):
    """Base of all schedules: they differ in `turns`. `staying`: what is trained of mostly frozen stages may stay on its
    device (`passes/staying.py`)."""

    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    rank: ClassVar[int] = 59
    decides: ClassVar[tuple[Decision, ...]] = (SCHEDULE, STAYING)
    word: ClassVar[str]  # what a plan calls it
    splits_backward: ClassVar[bool] = False  # whether the gradients of parameters may come after those of inputs
    takes_copies: ClassVar[bool] = False  # whether several devices may run a stage in turn
    staying: bool = True

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        is_synchronous = all(p.synchronous for p in passes)
        return [self.name] if self.marks or not is_synchronous else [self.name, "adapters travel"]

    def plan(self, draft: Draft) -> Any:
        found = choose_staying(draft) if self.staying else []
        return {SCHEDULE.name: self.word, STAYING.name: found or None}

    def gather(self, decided: Mapping[str, Any] | None) -> Any:
        """As in the base, but a plan need not say what stays."""
        if decided is None or decided.get(SCHEDULE.name) is None or STAYING.name not in self.fields():
            return super().gather(decided)
        return {name: decided.get(name) for name in self.fields()}

    def rewrite(self, draft: Draft, decision: Any) -> None:
        if draft.copies and not self.takes_copies:
            raise PassError(
                f"{self.name} has every stage on one device, and {min(draft.copies)} runs on several; use "
                "schedule-1f1b, or another pass in place of map-replicas"
            )
        own, given = self.split(self.plan(draft)), self.split(decision)
        staying = given.pop(STAYING.name, None)
        for name, value in given.items():
            require_own(self, name, value, own[name])
        specs = mark_staying(draft, own.get(STAYING.name) or [] if staying is None else staying)
        draft.stages = [replace(stage, spec=spec) for stage, spec in zip(draft.stages, specs, strict=True)]
        self.write(draft)

    def write(self, draft: Draft) -> None:
        """Write the programs."""
        flow = Flow(self.interface(draft), draft.devices, draft.copies)
        turns = self.turns(flow, draft)
        draft.programs = [Emitter(flow, device, turns).write() for device in flow.devices]

    @property
    def marks(self) -> bool:
        """Whether it marks parameters as staying; all that is asynchronous stays anyway."""
        return self.synchronous and self.staying

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        """All turns of a step with their devices, in the order in which they are expected to end; a device keeps to
        this order, too. Raises `PassError` where the schedule does not work with these stages and devices."""
        raise NotImplementedError

    def interface(self, draft: Draft) -> Interface:
        return interface_of(draft)


def interface_of(draft: Draft) -> Interface:
    if draft.graph.team != draft.mesh.team:
        raise PassError(
            f"the work inside layers is divided among {draft.graph.team} members of a team, but no lanes are a team; "
            f"put mesh{{team={draft.graph.team}}} after coarsen"
        )
    batch = {i.name: i for stage in draft.stages for i in stage.spec.inputs if i.name in draft.graph.inputs}
    sizes = draft.graph.sizes
    if sizes:
        batch[SIZES] = sizes_spec(sizes)
    precision = Precision.of(draft.options.precision)
    return Interface(
        stages={stage.spec.name: stage.spec for stage in draft.stages},
        batch=batch,
        num_devices=draft.lane_hardware.num_devices,
        micro_batches=draft.options.micro_batches,
        state_bytes_per_param=draft.options.state_bytes_per_param,
        states=_states(draft),
        master=precision.has_masters,
        rounds=precision.is_pure and not draft.options.optimizer_rounds,
        tiles=draft.options.optimizer_tiles,
        temporaries=_temporaries(draft),
        lanes=tuple(tuple(lane) for lane in draft.mesh.lanes),
        shards=draft.mesh.shards,
        team=draft.mesh.team,
        lane_micro_batches=tuple(draft.mesh.micro_batches),
        cuda_graphs=draft.options.cuda_graphs,
        sizes=sizes,
        divided=draft.graph.divided,
        apart=draft.graph.apart,
        groups={copies_group(stage): tuple((d, stage, "") for d in devices) for stage, devices in draft.copies.items()},
    )


def _states(draft: Draft) -> dict[str, int]:
    """Bytes of optimizer states by stage, and of each shard, where they are not the same for each element."""
    return {} if draft.options.state_bytes_of is None else _stage_bytes(draft, draft.options.state_bytes)


def _temporaries(draft: Draft) -> dict[str, dict[str, int]]:
    """Bytes that a step takes while it runs, by the memory in which it is made, where it takes any."""
    if draft.options.step_bytes_of is None:
        return {}
    counts = {memory: functools.partial(draft.options.step_bytes, memory=memory) for memory in (DEVICE, DRAM)}
    found = {memory: _stage_bytes(draft, bytes_of) for memory, bytes_of in counts.items()}
    return {memory: bytes_of for memory, bytes_of in found.items() if any(bytes_of.values())}


def _stage_bytes(draft: Draft, bytes_of: Callable[[Sequence[ParamSpec]], int]) -> dict[str, int]:
    """Bytes of each stage, and of the largest of its shards."""
    shards = draft.mesh.shards
    specs = [stage.spec for stage in draft.stages]
    found = {spec.name: bytes_of(spec.params) for spec in specs}
    if shards > 1:
        found |= {shard_key(s.name, shards): max(map(bytes_of, s.unlike_pieces(shards)), default=0) for s in specs}
    return found
