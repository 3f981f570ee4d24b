"""`mesh`: the machine's devices as lanes, each a whole copy of the computation on its share of the micro-batches.

In: a machine and a number of micro-batches. Out: a draft whose `lane_hardware` is what one lane has of the machine and
whose micro-batches are those of one lane, so that the passes after it plan one lane as they would plan a machine. A
lane is `depth` devices that divide the stages; `shards` consecutive lanes share each stage's weights, gradients and
optimizer states (MiCS 3.2, a partition group), and those that keep the same piece are each other's replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.errors import PassError
from ...ir.program import slice_of
from ..base import Pass
from ..decisions import NEAREST, Lanes, regular_lanes
from ..draft import Draft
from .group_size import smallest_group


@dataclass(frozen=True)
class Mesh(Pass):
    """`shards`: devices that share each stage; auto: as few as can hold it (`group_size.py`); `depth`: devices of one
    pipeline; `nearest`: which of the two are neighbours in the machine's order, and so on one host as far as they fit.
    The rest of the machine are replicas.

    Raises `PassError` where devices or micro-batches cannot be shared out equally, or a stage's forward changes a
    buffer: the lanes' copies of that would drift apart.
    """

    name: ClassVar[str] = "mesh"
    decides: ClassVar[str] = "mesh"
    needs: ClassVar[tuple[str, ...]] = ("blocks",)  # blocks have times for all the machine's devices
    gives: ClassVar[tuple[str, ...]] = ("mesh",)
    optional: ClassVar[bool] = True
    automatic: ClassVar[tuple[str, ...]] = ("shards",)
    shards: int = 1
    depth: int = 1
    nearest: str = "shards"

    def __post_init__(self) -> None:
        if self.nearest not in NEAREST:
            raise PassError(f"pass {self.name!r}: option nearest={self.nearest!r} is none of {', '.join(NEAREST)}")
        for name, value, least in (("shards", self.shards, 0), ("depth", self.depth, 1)):
            if value < least:
                raise PassError(f"pass {self.name!r}: option {name}={value}; it is at least 1")

    def plan(self, draft: Draft) -> Lanes:
        shards = self.shards or smallest_group(draft, self.depth)
        count, each = draft.machine.num_devices, shards * self.depth
        if count % each:
            near = [n for n in range(each, count + 1) if count % n == 0]
            raise PassError(
                f"{shards} shards x {self.depth} deep are {each} devices, and {count} cannot be divided by that; "
                f"the nearest number that can is {near[0]}"
            )
        return Lanes(lanes=regular_lanes(count, shards, self.depth, self.nearest), shards=shards)

    def rewrite(self, draft: Draft, decision: Lanes) -> None:
        lanes = decision.lanes
        _check_lanes(lanes, decision.shards, draft.machine.num_devices)
        if draft.partition:
            raise PassError(f"{self.name} comes before stages are cut: they are cut for the devices of a lane")
        if len(lanes) == 1:
            return
        if decision.shards > 1 and draft.options.whole_optimizer:
            raise PassError(
                f"{self.name}: every device updates a piece of each parameter, but {draft.options.whole_optimizer} "
                "looks at whole parameters, or at blocks of them. Use an optimizer such as torch.optim.AdamW, or "
                'another strategy, such as "mobius"'
            )
        _check_shares(draft.options.micro_batches, len(lanes))
        _check_buffers(draft)
        draft.mesh, draft.lane_part = decision, slice_of(draft.machine, lanes)
        draft.options = replace(draft.options, micro_batches=draft.options.micro_batches // len(lanes))


def _check_lanes(lanes: list[list[int]], shards: int, count: int) -> None:
    """Raise `PassError` where a plan's lanes are not what every lane must be."""
    used = sorted(device for lane in lanes for device in lane)
    if used != list(range(count)) or len({len(lane) for lane in lanes}) != 1:
        raise PassError(f"mesh: lanes are {lanes}; equally long, they hold each of the devices 0 to {count - 1} once")
    if shards < 1 or len(lanes) % shards:
        raise PassError(f"mesh: {shards} shards; the {len(lanes)} lanes cannot be divided by that")


def _check_shares(count: int, lanes: int) -> None:
    if count % lanes:
        near = max(lanes, round(count / lanes) * lanes)
        raise PassError(
            f"{count} micro-batches cannot be shared out equally among {lanes} lanes; the nearest micro_batches that "
            f"can is {near}"
        )


def _check_buffers(draft: Draft) -> None:
    changed = next((n for n in draft.graph.nodes if n.meta.get("updates_buffers")), None)
    if changed is not None:
        raise PassError(
            f"{changed.name} ({changed.meta.get('source', '')}) changes a buffer in every forward, such as the running "
            "statistics of a batch normalisation; lanes that train on different micro-batches would each have their "
            'own. Use a pipeline, such as strategy="gpipe", or freeze the statistics'
        )
