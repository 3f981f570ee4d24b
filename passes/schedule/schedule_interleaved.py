"""`schedule-interleaved`: one forward, one backward over several stages a device (Megatron-LM, Narayanan 2021, 2.2).

In: stages that go round the devices two or more times. Out: `draft.programs`, which differ from those of
`schedule-pipeline` in their order. A device runs a group of about one micro-batch for each device through its first
stage, then through its second, and so on, and backward in reverse. The pipeline fills with one stage's work instead of
a whole device's, so with v stages a device its bubble is a v-th of that of `schedule-1f1b`; in return a value crosses v
times the number of borders, and the first of N devices holds (v - 1) N + 2 (N - 1) + 1 pairs of a stage and a
micro-batch, each a v-th of what a micro-batch of `schedule-1f1b` holds.

Micro-batches need not be a multiple of the devices: groups are as equal as they can be, none smaller than the number of
devices where there are enough. Backwards of a stage come in the order of its micro-batches and those of a device in
reverse order of stages, so training is bit for bit that of `schedule-pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from ...ir.errors import PassError
from ..draft import Draft
from .flow import Flow, Placed, Turn
from .schedule import Schedule
from .timetable import ended_in_turn

Slot = tuple[int, int]  # index among a device's stages, and a micro-batch


@dataclass(frozen=True)
class ScheduleInterleaved(Schedule):
    """Raises `PassError` where stages do not go round the devices at least twice."""

    name: ClassVar[str] = "schedule-interleaved"
    rank: ClassVar[int] = 52
    word: ClassVar[str] = "interleaved"

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        _check_stages(draft.devices, draft.lane_hardware.num_devices)
        return ended_in_turn(flow, draft, {device: turns_of(flow, device) for device in flow.devices})


def _check_stages(devices: Sequence[int], num_devices: int) -> None:
    count = len(devices)
    if count < 2 * num_devices or count % num_devices:
        rounds = max(2, count // num_devices)
        near = [n * num_devices for n in (rounds, rounds + 1)]
        raise PassError(
            f"schedule-interleaved goes round the devices at least twice, but there are {count} stages for "
            f"{num_devices} devices; the nearest numbers that work are {near[0]} and {near[1]}, for instance "
            f"partition-balanced{{stages={near[0]}}}; schedule-1f1b takes any"
        )
    wrong = next((i for i, device in enumerate(devices) if device != i % num_devices), None)
    if wrong is not None:
        raise PassError(
            f"schedule-interleaved needs stages that go round the devices, but stage{wrong} is on device "
            f"{devices[wrong]} instead of {wrong % num_devices}; use map-round-robin, or schedule-1f1b, which takes any"
        )


def turns_of(flow: Flow, device: int) -> list[Turn]:
    """The turns of a device, in order: forwards until its first backward can begin, then both in turn, then
    backwards."""
    own = flow.on(device)
    order = interleave(device, flow.interface.num_devices, len(own), flow.interface.micro_batches)
    turns = [Turn(own[stage].name, m, is_backward) for (stage, m), is_backward in order]
    return [turn for turn in turns if not turn.is_backward or turn.stage in flow.trained]


def interleave(device: int, num_devices: int, num_stages: int, micro_batches: int) -> list[tuple[Slot, bool]]:
    """The forwards and backwards (True) of a device with `num_stages` stages, in order."""
    groups = micro_batch_groups(num_devices, micro_batches)
    forwards = _slots(range(num_stages), groups)
    backwards = _slots(range(num_stages - 1, -1, -1), groups)
    ahead = min(len(forwards), (num_stages - 1) * len(groups[0]) + 2 * (num_devices - 1 - device))
    order = [(slot, False) for slot in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [(forward, False), (backward, True)]
    return order + [(slot, True) for slot in backwards[len(forwards) - ahead :]]


def micro_batch_groups(num_devices: int, micro_batches: int) -> list[range]:
    """The most groups with a micro-batch per device, the larger ones first; one group where there are too few."""
    count = max(1, micro_batches // num_devices)
    least, more = divmod(micro_batches, count)
    ends = accumulate((least + (i < more) for i in range(count)), initial=0)
    return [range(a, b) for a, b in pairwise(ends)]


def _slots(stages: Iterable[int], groups: Sequence[range]) -> list[Slot]:
    """The slots that take every group through all stages before the next group."""
    stages = list(stages)
    return [(stage, m) for group in groups for stage in stages for m in group]
