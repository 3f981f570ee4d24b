"""`unpack-once`: a forward that runs again leaves its backward the quantised weights that it unpacks.

In: programs. Out: the same programs, in which backwards of the decided stages have `unpack_once=True`. A frozen weight
of 4 or 8 bits is unpacked for every product. Where a stage runs forward again, its backward follows at once: the weight
is then unpacked for both together, and takes memory in between. A stage is decided where each of its backwards has that
room, beside the weights of another stage where stages come from DRAM. It comes before `insert-fetch`, which fills what
is left with early fetches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import Program, infer, profile_memory, work_of
from ..base import Explanation, Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft
from .insert_fetch import swap as swapped


@dataclass(frozen=True)
class UnpackOnce(Pass):
    """It has no options."""

    name: ClassVar[str] = "unpack-once"
    rank: ClassVar[int] = 61
    needs: ClassVar[tuple[str, ...]] = ("programs", "remat")
    precedes: ClassVar[tuple[str, ...]] = ("tiers",)
    label_rank: ClassVar[int] = 2
    # stages whose forwards run again and leave backward what they unpack
    decides: ClassVar[tuple[Decision, ...]] = (Decision("unpacked", list[str], []),)

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["unpacked once"]

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        able = best.end is not None and best.find(cls) is None and any(map(_able, best.end.programs))
        return [cls()] if able else []

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        if not decisions.unpacked:
            return Explanation()
        text = f"{', '.join(decisions.unpacked)}: a forward that runs again leaves backward the weights that it unpacks"
        return Explanation([text], heading="quantised weights")

    def plan(self, draft: Draft) -> list[str]:
        """The names of the stages, in order."""
        short = {stage for program in draft.programs for stage in _short_stages(draft, program)}
        able = {str(node.args[0]) for program in draft.programs for node in _able(program)}
        return [stage.spec.name for stage in draft.stages if stage.spec.name in able - short]

    def rewrite(self, draft: Draft, decision: Collection[str]) -> None:
        able = {str(node.args[0]) for program in draft.programs for node in _able(program)}
        for name in decision:
            if name not in able:
                raise PassError(f"unpacked names {name!r}; the stages able to are {', '.join(sorted(able)) or 'none'}")
        for program in draft.programs:
            _unpack_once(program, [node for node in _able(program) if node.args[0] in decision])


def _able(program: Program) -> list[fx.Node]:
    """The backwards that run again a forward which unpacks weights. CUDA graphs have fixed memory for both passes."""
    if program.interface.cuda_graphs:
        return []
    backwards = [node for node in program.ops() if node.target is ops.backward and _runs_again(node)]
    return [node for node in backwards if program.interface.stages[str(node.args[0])].unpacked is not None]


def _runs_again(backward: fx.Node) -> bool:
    kept = backward.args[2]
    return kept is None or (isinstance(kept, fx.Node) and bool(kept.meta["type"].classes))


def _unpack_once(program: Program, backwards: Sequence[fx.Node]) -> None:
    for node in backwards:
        node.kwargs = {**node.kwargs, "unpack_once": True}
        infer(program, node)


def _short_stages(draft: Draft, program: Program) -> set[str]:
    """The stages of which a backward would exceed the device's memory."""
    specs = [stage.spec for stage in draft.stages_on(program.device)]
    states_bytes = sum(program.interface.optimizer_bytes(spec) for spec in specs)
    lasting_bytes = sum(spec.all_weight_bytes + spec.grad_bytes for spec in specs) + states_bytes
    room_bytes = draft.lane_hardware.devices[program.device].budget_bytes
    before, trial = program.copy(), program.copy()
    _unpack_once(trial, _able(trial))
    moving = [spec for spec in specs if spec.name not in draft.resident]
    if lasting_bytes <= room_bytes:
        profile = profile_memory(before)
        room_bytes -= states_bytes
    else:
        profile = swapped(before, {spec.name: {} for spec in moving})
        room_bytes -= max((spec.weight_bytes for spec in moving), default=0)
    found = set()
    for node, other in zip(_able(before), _able(trial), strict=True):
        more_bytes = work_of(trial, other).workspace_bytes - work_of(before, node).workspace_bytes
        if profile.live_bytes[node] + more_bytes > room_bytes:
            found.add(str(node.args[0]))
    return found
