"""`mesh`: the machine's devices as lanes, each a whole copy of the computation on its share of the micro-batches.

In: a machine and a number of micro-batches. Out: a draft whose `lane_hardware` is what one lane has of the machine and
whose micro-batches are those of one lane (where lanes are unequal, of one with the most), so that the passes after it
plan one lane as they would plan a machine. A lane is `depth` devices that divide the stages; `shards` consecutive lanes
share each stage's weights, gradients and optimizer states (MiCS 3.2, a partition group), and those that keep the same
piece are each other's replicas. `team` consecutive lanes run the same micro-batches together, each a part of the work
inside a layer, which a pass over the op graph has divided. Where members of a team have parts of weights, lanes in the
same place of `shards` teams share their stages: the two are axes across each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.errors import PassError
from ...ir.program import slice_of
from ...runtime.functions.chosen import gradient_if
from ..base import Pass
from ..decisions import NEAREST, Decision, Lanes, lanes_beside, regular_lanes
from ..draft import Draft
from .by_speed import lanes_by_speed
from .group_size import smallest_group


@dataclass(frozen=True)
class Mesh(Pass):
    """`shards`: devices that share each stage; auto: as few as can hold it (`group_size.py`); `depth`: devices of one
    pipeline; `team`: lanes that run the same micro-batches together; auto: the number of members that the op graph's
    work inside layers is divided among; `nearest`: which of the two, lanes or a pipeline, are neighbours in the
    machine's order, and so on one host as far as they fit. The rest of the machine are replicas. `by_speed`: a lane has
    micro-batches by the speed of its devices (`by_speed.py`); otherwise all have the same number.

    Raises `PassError` where devices or micro-batches cannot be shared out so, or a stage's forward changes a
    buffer: the lanes' copies of that would drift apart.
    """

    name: ClassVar[str] = "mesh"
    rank: ClassVar[int] = 40
    # None: one lane of all devices
    decides: ClassVar[tuple[Decision, ...]] = (Decision("mesh", Lanes | None, None, hashed=True),)
    needs: ClassVar[tuple[str, ...]] = ("blocks",)  # blocks have times for all the machine's devices
    gives: ClassVar[tuple[str, ...]] = ("mesh",)
    precedes: ClassVar[tuple[str, ...]] = ("stages",)  # they are cut for the devices of a lane
    automatic: ClassVar[tuple[str, ...]] = ("shards", "team")
    shards: int = 1
    depth: int = 1
    nearest: str = "shards"
    team: int = 0
    by_speed: bool = False

    def __post_init__(self) -> None:
        if self.nearest not in NEAREST:
            raise PassError(f"pass {self.name!r}: option nearest={self.nearest!r} is none of {', '.join(NEAREST)}")
        for name, value, least in (("shards", self.shards, 0), ("depth", self.depth, 1), ("team", self.team, 0)):
            if value < least:
                raise PassError(f"pass {self.name!r}: option {name}={value}; it is at least 1")

    def plan(self, draft: Draft) -> Lanes:
        shards, team = self.shards or smallest_group(draft, self.depth), self.team or draft.graph.team
        crossed = draft.graph.divided and shards > 1
        if not crossed and max(shards, team) % min(shards, team):
            if self.shards:
                raise PassError(
                    f"pass {self.name!r}: shards={shards} and team={team}; one of the two is a multiple of the other, "
                    f"such as shards={team}, which spreads weights over the team"
                )
            shards = math.lcm(shards, team)
        count, beside = draft.machine.num_devices, lanes_beside(shards, team, crossed)
        each = beside * self.depth
        if count % each:
            near = [n for n in range(each, count + 1) if count % n == 0]
            what = f"a team of {team}" if team > shards else f"{shards} shards"
            what = f"{shards} shards of teams of {team}" if crossed else what
            raise PassError(
                f"{what} x {self.depth} deep are {each} devices, and {count} cannot be divided by that; "
                f"the nearest number that can is {near[0] if near else count}"
            )
        lanes = regular_lanes(count, beside, self.depth, self.nearest)
        found = Lanes(lanes=lanes, shards=shards, team=team, crossed=crossed)
        return lanes_by_speed(draft, found) if self.by_speed else found

    def rewrite(self, draft: Draft, decision: Lanes) -> None:
        lanes = decision.lanes
        _check_lanes(decision, draft.machine.num_devices)
        _check_team(draft, decision.team)
        _check_crossed(draft, decision)
        if len(lanes) == 1:
            return
        if decision.shards > 1 and draft.options.whole_optimizer:
            raise PassError(
                f"{self.name}: every device updates a piece of each parameter, but {draft.options.whole_optimizer} "
                "looks at whole parameters, or at blocks of them. Use an optimizer such as torch.optim.AdamW, or "
                'another strategy, such as "mobius"'
            )
        teams = len(lanes) // decision.team
        if decision.micro_batches:
            _check_unequal(draft.options.micro_batches, decision)
        else:
            _check_shares(draft.options.micro_batches, teams, "teams" if decision.team > 1 else "lanes")
        _check_buffers(draft)
        draft.mesh, draft.lane_part = decision, slice_of(draft.machine, lanes)
        most = max(decision.micro_batches, default=draft.options.micro_batches // teams)
        draft.options = replace(draft.options, micro_batches=most)


def _check_lanes(decision: Lanes, count: int) -> None:
    """Raise `PassError` where a plan's lanes are not what every lane must be."""
    lanes, shards, team = decision.lanes, decision.shards, decision.team
    used = sorted(device for lane in lanes for device in lane)
    if used != list(range(count)) or len({len(lane) for lane in lanes}) != 1:
        raise PassError(f"mesh: lanes are {lanes}; equally long, they hold each of the devices 0 to {count - 1} once")
    if shards < 1 or len(lanes) % shards:
        raise PassError(f"mesh: {shards} shards; the {len(lanes)} lanes cannot be divided by that")
    if (
        team < 1
        or len(lanes) % decision.lanes_together
        or (not decision.crossed and max(shards, team) % min(shards, team))
    ):
        raise PassError(
            f"mesh: teams of {team}; the {len(lanes)} lanes, of which {shards} share stages, cannot be divided by that"
        )


def _check_team(draft: Draft, team: int) -> None:
    """Raise `PassError` where lanes are a team but nothing divides the work inside layers among them, or otherwise."""
    if team != draft.graph.team:
        divided = f"divided among {draft.graph.team} members" if draft.graph.team > 1 else "not divided"
        raise PassError(
            f"mesh: teams of {team}, but the work inside layers is {divided}; use mesh{{team={draft.graph.team}}}"
            + ("" if draft.graph.team > 1 else ", or put the pass that divides it before coarsen")
        )


def _check_crossed(draft: Draft, decision: Lanes) -> None:
    """Raise `PassError` where members of a team have parts of weights, and lanes of one team share stages, or where
    they have none and lanes of several teams do."""
    if decision.crossed != (draft.graph.divided and decision.shards > 1):
        parts = "parts" if draft.graph.divided else "no parts"
        raise PassError(
            f"mesh: crossed is {decision.crossed}, but members of a team have {parts} of weights, and "
            f"{decision.shards} lanes share stages; allowed is {not decision.crossed}"
        )


def _check_shares(count: int, lanes: int, what: str) -> None:
    if count % lanes:
        near = max(lanes, round(count / lanes) * lanes)
        raise PassError(
            f"{count} micro-batches cannot be shared out equally among {lanes} {what}; the nearest micro_batches that "
            f"can is {near}"
        )


def _check_unequal(count: int, decision: Lanes) -> None:
    """Raise `PassError` where shares are not the batch, or lanes that share stages or are a team have unequal ones."""
    given, lanes, beside = decision.micro_batches, len(decision.lanes), decision.lanes_together
    if len(given) != lanes or sum(given[:: decision.team]) != count:
        what = "one number each" if decision.team == 1 else f"one number each, {decision.team} in a row the same"
        raise PassError(f"mesh{{micro_batches={given}}}: {lanes} lanes have {what}, {count} in all")
    if any(len(set(given[i : i + beside])) > 1 for i in range(0, lanes, beside)):
        raise PassError(
            f"mesh{{micro_batches={given}}}: every {beside} lanes in a row share stages or are a team, and meet in "
            "every micro-batch, so they have the same number"
        )


def _check_buffers(draft: Draft) -> None:
    changed = next((n for n in draft.graph.nodes if n.meta.get("updates_buffers")), None)
    if changed is not None:
        raise PassError(
            f"{changed.name} ({changed.meta.get('source', '')}) changes a buffer in every forward, such as the running "
            "statistics of a batch normalisation; lanes that train on different micro-batches would each have their "
            'own. Use a pipeline, such as strategy="gpipe", or freeze the statistics'
        )
    skipped = next((n for n in draft.graph.nodes if n.target is gradient_if), None)
    if skipped is not None:
        raise PassError(
            f"{skipped.meta.get('source', '')} runs where rows were chosen, such as tokens for an expert: without any, "
            "parameters have no gradient, and lanes that train on different micro-batches would have gradients of "
            'different ones. Use a pipeline, such as strategy="gpipe"'
        )
