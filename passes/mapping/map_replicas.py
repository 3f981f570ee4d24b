"""`map-replicas`: a stage may run on several devices, which take its micro-batches in turn (PipeDream 3.1, 3.2).

In: fewer stages than devices. Out: `draft.devices`, and `draft.copies`: per stage that several devices run, these. Each
device keeps the whole stage and runs every r-th micro-batch; once a step their gradients are summed, and the sum of a
parameter that the stage shares with others is added to theirs. Devices that no
stage needs join the stage that is then slowest for its number of devices, so stage 0 may run on three devices and stage
1 on one. All stages on one device each are `map-round-robin`; one stage on all devices is data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...graph.costs.stage_time import stage_seconds
from ...ir.errors import PassError
from ...runtime.functions.chosen import gradient_if
from ..decisions import Decision
from ..draft import Draft
from .mapping import DEVICES, Mapping


@dataclass(frozen=True)
class MapReplicas(Mapping):
    """Raises `PassError` where stages go round the devices, a stage's devices differ, it cannot be copied, or it would
    have more devices than micro-batches."""

    name: ClassVar[str] = "map-replicas"
    rank: ClassVar[int] = 44
    decides: ClassVar[tuple[Decision, ...]] = (
        DEVICES,
        Decision("copies", dict[str, list[int]], {}),  # stage that several devices of a lane run in turn -> these
    )
    gives: ClassVar[tuple[str, ...]] = ("devices", "copies")

    def plan(self, draft: Draft) -> Any:
        units = _units(draft)
        counts = _counts(draft, units)
        devices, copies, first = [0] * len(draft.stages), dict[str, list[int]](), 0
        for unit, count in zip(units, counts):
            for stage in unit:
                devices[stage] = first
                if count > 1:
                    copies[draft.stages[stage].spec.name] = list(range(first, first + count))
            first += count
        return {"devices": devices, "copies": copies}

    def rewrite(self, draft: Draft, decision: Any) -> None:
        super().rewrite(draft, decision["devices"])
        copies: dict[str, list[int]] = decision["copies"]
        home = {stage.spec.name: device for stage, device in zip(draft.stages, draft.devices)}
        for stage, devices in copies.items():
            if stage not in home or devices[:1] != [home[stage]] or len(set(devices)) < len(devices):
                raise PassError(
                    f"copies has {stage}: {devices}; a stage's devices are different ones, of which the first is its "
                    f"device; the stages are {', '.join(home)}"
                )
            wrong = [d for d in devices if not 0 <= d < draft.lane_hardware.num_devices]
            if wrong:
                raise PassError(f"copies of {stage} names device {wrong[0]}; there are 0 to {len(_kinds(draft)) - 1}")
        _check(draft, copies)
        draft.copies = {stage: list(devices) for stage, devices in copies.items() if len(devices) > 1}


def _units(draft: Draft) -> list[list[int]]:
    """The stages of each device that they were cut for, in order."""
    units: dict[int, list[int]] = {}
    for stage, device in enumerate(draft.planned_for):
        units.setdefault(device, []).append(stage)
    count = draft.lane_hardware.num_devices
    rounds = max(map(len, units.values()))
    in_order = [stage for unit in units.values() for stage in unit] == list(range(len(draft.stages)))
    if rounds > 1 and not in_order:
        raise PassError(
            f"map-replicas: {len(draft.stages)} stages go round {count} devices; it takes one stage a device or fewer, "
            f"such as partition-balanced{{stages={max(1, count - 1)}}}"
        )
    return list(units.values())


def _counts(draft: Draft, units: list[list[int]]) -> list[int]:
    """The number of devices of each unit: a device at a time joins the unit that is slowest for its number."""
    device, precision = draft.lane_hardware.devices[0], draft.options.precision
    took_s = [sum(stage_seconds(draft.stages[s].spec, device, precision).both_s for s in unit) for unit in units]
    most = min(draft.mesh.micro_batches, default=draft.options.micro_batches)
    counts = [1] * len(units)
    for _ in range(draft.lane_hardware.num_devices - len(units)):
        able = [i for i in range(len(units)) if counts[i] < most]
        if able:
            counts[max(able, key=lambda i: took_s[i] / counts[i])] += 1
    return counts


def _kinds(draft: Draft) -> list[int]:
    return draft.lane_hardware.device_kinds


def _check(draft: Draft, copies: dict[str, list[int]]) -> None:
    """Raise `PassError` where stages cannot be copied so."""
    most = min(draft.mesh.micro_batches, default=draft.options.micro_batches)
    for stage in draft.stages:
        devices = copies.get(stage.spec.name, [])
        if len(devices) < 2:
            continue
        name = stage.spec.name
        if len({_kinds(draft)[d] for d in devices}) > 1:
            raise PassError(
                f"{name} would run on devices {', '.join(map(str, devices))} in turn, and they differ; use "
                "mesh{by_speed=true}, which gives each its share"
            )
        if len(devices) > most:
            raise PassError(f"{name} has {len(devices)} devices for {most} micro-batches; use {len(devices)} or more")
        own = {node for block in draft.blocks if block.name in stage.blocks for node in block.nodes}
        changed = next((n for n in draft.graph.nodes if n.meta.get("updates_buffers") and n in own), None)
        if changed is not None:
            raise PassError(
                f"{changed.name} ({changed.meta.get('source', '')}) of {name} changes a buffer in every forward; "
                "devices that run other micro-batches would each have their own. Use map-round-robin"
            )
        if any(node.target is gradient_if for node in own):
            raise PassError(
                f"{name} has parameters without a gradient where no rows were chosen, as tokens for an expert, and "
                "devices that run other micro-batches would have gradients of different ones. Use map-round-robin"
            )
    if copies and draft.mesh.shards > 1:
        raise PassError("map-replicas: shared stages are gathered in every micro-batch; use map-round-robin")
