"""`take-turns`: of the weights that devices fetch through one root complex, those that are needed first come first.

In: whole programs. Out: the same programs, in which fetches of weights have a `link_turn`, where devices share a root
complex: number 0 is needed first (Mobius 3.3). Without turns these fetches share the link evenly, so that the weights
that a device waits for come late, beside others that nobody needs yet.

A fetch is needed where its weights are first used, at the earliest: if transfers took no time. In a pipeline that fills
and drains these are the stages in their order, and in backward the other way, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any, ClassVar

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, build_order, link_turn_of
from ...runtime.simulate import CostModel
from ..base import Explanation, Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft
from ..receive_earlier import simulated_s

LEAST_GAIN = 0.01  # of a step: a run of the same plan differs by as much from another
WEIGHTS = ("weights", "part", "shard")


@dataclass(frozen=True)
class TakeTurns(Pass):
    """`always`: also where a simulated step does not gain by it."""

    name: ClassVar[str] = "take-turns"
    rank: ClassVar[int] = 66
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers", "optimizer")
    gives: ClassVar[tuple[str, ...]] = ("turns",)
    label_rank: ClassVar[int] = 2
    of_leaders: ClassVar[bool] = True
    # whether fetches through one root complex come by when they are needed
    decides: ClassVar[tuple[Decision, ...]] = (Decision("link_turns", bool, False),)
    always: bool = False

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["links in turns"]

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        if best.end is None or not sharing(best.end.programs, best.end.lane_hardware):
            return []
        return [best.find(cls) or cls()]

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        number = sum(link_turn_of(node) is not None for program in programs for node in program.ops())
        if not number:
            return Explanation()
        text = f"{number} fetches of weights: through one root complex, what is needed first comes first"
        return Explanation([text], heading="turns on links")

    def plan(self, draft: Draft) -> bool:
        """Whether fetches have turns."""
        hardware = draft.lane_hardware
        if not sharing(draft.programs, hardware):
            return False
        if self.always:
            return True
        on_threads = all(device.kind == "cpu" for device in hardware.devices) and not hardware.throttled
        if on_threads:  # copies share cores, not links
            return False
        trial = replace(draft, programs=[program.copy() for program in draft.programs], notes={})
        number_fetches(trial.programs, hardware, draft.options.precision)
        fair_s, ordered_s = simulated_s(draft, draft.programs), simulated_s(trial, trial.programs)
        return ordered_s is not None and (fair_s is None or ordered_s <= (1 - LEAST_GAIN) * fair_s)

    def rewrite(self, draft: Draft, decision: bool) -> None:
        if decision:
            number_fetches(draft.programs, draft.lane_hardware, draft.options.precision)


def sharing(programs: Sequence[Program], hardware: Hardware) -> set[int]:
    """The devices that fetch weights through a root complex through which another device fetches some."""
    fetching = [program.device for program in programs if any(map(brings_weights, program.ops()))]
    homes = {device: (hardware.devices[device].host, hardware.devices[device].root_complex) for device in fetching}
    return {device for device in fetching if list(homes.values()).count(homes[device]) > 1}


def brings_weights(node: fx.Node) -> bool:
    return node.target is ops.fetch and node.meta["type"].kind in WEIGHTS


def number_fetches(programs: Sequence[Program], hardware: Hardware, precision: str) -> None:
    """Give each fetch of weights of devices that share a root complex its turn, by when its weights are needed."""
    mine = sharing(programs, hardware)
    needed_s = _earliest_s(programs, hardware, precision)
    fetches = [node for program in programs if program.device in mine for node in program.ops() if brings_weights(node)]
    fetches.sort(key=lambda fetch: needed_s[_first_use(fetch)])  # of equal ones in the order of devices and text
    for turn, fetch in enumerate(fetches):
        fetch.kwargs = {**fetch.kwargs, "link_turn": turn}


def _first_use(fetch: fx.Node) -> fx.Node:
    """The first op that computes with what a fetch brings, or meets other devices with it."""
    while op_of(fetch).prepares:
        following = [user for user in fetch.users if user.op != "output" and user.target is not ops.free]
        if not following:
            break
        fetch = following[0]
    return fetch


def _earliest_s(programs: Sequence[Program], hardware: Hardware, precision: str) -> dict[fx.Node, float]:
    """The seconds at which each op could begin if computation alone took time."""
    order, model = build_order(programs, {}), CostModel(hardware, precision)
    begin_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    waits = {index: [other for other, _ in task.waits] for index, task in enumerate(order.tasks)}
    for index in TopologicalSorter(waits).static_order():
        device, _, work = order.tasks[index].parts[0]
        begin_s[index] = max((end_s[other] for other in waits[index]), default=0.0)
        takes_s = model.compute_s(hardware.devices[device], work) if work.stream == ops.COMPUTE else 0.0
        end_s[index] = begin_s[index] + takes_s
    return {node: begin_s[index] for node, index in order.task_of.items()}
