"""`insert-remat`: backward of a stage runs its forward again instead of keeping saved tensors (Mobius 3.1, FTPipe 4.3).

In: programs. Out: the same programs in which the decided stages forward with `keep=False` and whose backward takes no
`kept`. Stages are rematerialised only if their device would otherwise exceed its memory: those whose forwards take the
least seconds together (`run_again`). Where not even all of them let the weights stay resident, every stage but the
device's last is rematerialised, since its weights leave in between, and the last one, too, where early fetches need the
room. Rows that came to such a stage's experts are not kept, either: they come again, as there is room for N times those
that a member sends.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...graph.costs.stage_time import stage_seconds
from ...ir import ops
from ...ir.calls import op_of
from ...ir.errors import PassError
from ...ir.program import (
    MemoryProfile,
    Program,
    StageSpec,
    donated_operands,
    infer,
    infer_all,
    place_frees,
    producer_of,
    profile_memory,
    values_of,
)
from ..base import Pass
from ..decisions import REMATERIALISE, Decision
from ..draft import Draft
from ..equal_programs import look, once
from ..run_again import cheapest_again
from .insert_fetch import Early, bytes_with_fetches, look_ahead
from .insert_fetch import swap as swapped


@dataclass(frozen=True)
class InsertRemat(Pass):
    """`swap`: weights will be swapped even where they could stay (`insert-fetch{swap=true}`), which leaves the room of
    their optimizer states to saved tensors. `always`: every stage that can be is rematerialised; `never`: none, whether
    or not it fits. Raises `PassError` for both."""

    name: ClassVar[str] = "insert-remat"
    rank: ClassVar[int] = 60
    needs: ClassVar[tuple[str, ...]] = ("programs",)
    gives: ClassVar[tuple[str, ...]] = ("remat",)
    label_rank: ClassVar[int] = 1
    decides: ClassVar[tuple[Decision, ...]] = (REMATERIALISE,)
    swap: bool = False
    always: bool = False
    never: bool = False

    def __post_init__(self) -> None:
        if self.always and self.never:
            raise PassError(f"pass {self.name!r}: found always=true and never=true; allowed is one of them")

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["all computed again"] if self.always else ["none computed again"] if self.never else []

    def plan(self, draft: Draft) -> list[str]:
        """Names of the stages to rematerialise."""
        if self.always:
            return [stage.spec.name for stage in draft.stages if stage.spec.rematerialisable]
        if self.never:
            return []
        chosen: list[str] = []
        known: dict[Hashable, list[int]] = {}
        for program in draft.programs:
            device = draft.lane_hardware.devices[program.device]
            specs = [s.spec for s in draft.stages_on(program.device)]
            precision = draft.options.precision
            again_s = {spec.name: stage_seconds(spec, device, precision).rematerialise_s for spec in specs}

            def on_one(
                program: Program = program,
                specs: list[StageSpec] = specs,
                again_s: dict[str, float] = again_s,
                budget_bytes: int = device.budget_bytes,
            ) -> list[int]:
                names = stages_to_rematerialise(program, specs, again_s, budget_bytes, self.swap, draft.resident)
                return [i for i, spec in enumerate(specs) if spec.name in names]

            stays = tuple(spec.name in draft.resident for spec in specs)
            key = (look(program, specs), tuple(again_s.values()), device.budget_bytes, stays)
            chosen += [specs[i].name for i in once(known, key, on_one)]
        return [s.spec.name for s in draft.stages if s.spec.name in chosen]

    def rewrite(self, draft: Draft, decision: list[str]) -> None:
        known = {stage.spec.name: stage.spec for stage in draft.stages}
        for name in decision:
            if name not in known:
                raise PassError(f"rematerialise names {name!r}; the stages are {', '.join(known)}")
            if not known[name].rematerialisable:
                raise PassError(f"{name} writes a buffer that its forward reads; it cannot be rematerialised")
        for program in draft.programs:
            rematerialise(program, set(decision))


def stages_to_rematerialise(
    program: Program,
    specs: list[StageSpec],
    again_s: dict[str, float],
    budget_bytes: int,
    swap: bool = False,
    resident: Collection[str] = (),
) -> list[str]:
    """The stages that let the resident program fit if they run again, in the least seconds; where there are none, those
    that swapping needs. `again_s`: seconds of each stage's rematerialisation. With `swap`, the same for weights that
    come from DRAM and stay from forward to backward. `resident`: the stages that stay though others do not."""
    states = sum(program.interface.optimizer_bytes(s) for s in specs)
    # All of this is there at the end of the step.
    lasting = sum(s.weight_bytes + s.staying_bytes + s.grad_bytes for s in specs) + states
    if lasting > budget_bytes and not swap:
        return _for_swapping(program, specs, budget_bytes, resident)
    able = [spec for spec in specs if spec.rematerialisable]
    limit_bytes = budget_bytes - (0 if swap else states)

    def with_again(names: Sequence[str]) -> tuple[Program, MemoryProfile]:
        tried = program.copy()
        rematerialise(tried, set(names))
        moving: Early = {s.name: {} for s in specs if s.name not in resident}
        return tried, swapped(tried, moving) if swap else profile_memory(tried)

    def excess_bytes(names: Sequence[str]) -> int:
        return with_again(names)[1].peak_bytes[ops.DEVICE] - limit_bytes

    kept, profile = with_again([])
    if profile.peak_bytes[ops.DEVICE] <= limit_bytes:
        return []
    if not able:
        return _for_swapping(program, specs, budget_bytes, resident)
    moments = _moments(kept, profile, able)
    missing = [live_bytes - limit_bytes for live_bytes, _ in moments]
    seconds, frees = [again_s[spec.name] for spec in able], [frees for _, frees in moments]
    while (some := cheapest_again(seconds, missing, frees)) is not None:
        names = [able[i].name for i in some]
        if (over := excess_bytes(names)) <= 0:
            return names
        missing = [each + over for each in missing]  # workspaces differ
    # More than saved tensors may be freed: of a stage that runs from CUDA graphs, all its slots but one.
    by_size = [spec.name for spec in sorted(able, key=lambda s: -s.kept_bytes)]
    if excess_bytes(by_size) > 0:
        return _for_swapping(program, specs, budget_bytes, resident)
    return by_size[: bisect.bisect_left(range(len(able)), True, lo=1, key=lambda n: excess_bytes(by_size[:n]) <= 0)]


def _moments(program: Program, profile: MemoryProfile, specs: list[StageSpec]) -> list[tuple[int, list[int]]]:
    """The fullest moments of each stage's ops: device memory then, and what each stage would leave free if it ran
    again, all but what its own backward then makes."""
    number = {spec.name: i for i, spec in enumerate(specs)}
    stage_of: dict[fx.Node, int] = {}  # of kept values
    now = [0] * len(specs)
    found: dict[tuple[str, str], tuple[int, list[int]]] = {}
    for node in program.ops():
        stage = str(node.args[0]) if node.args else ""
        for value in node.all_input_nodes if node.target is ops.free else donated_operands(node):
            if value in stage_of:
                now[stage_of[value]] -= 1
        if node.target is ops.forward and node.kwargs.get("keep", True) and stage in number:
            stage_of[values_of(node)[-1]] = number[stage]
            now[number[stage]] += 1
        own = [op_of(node).takes_kept and number.get(stage) == i for i in range(len(specs))]
        frees = [(count - once) * spec.kept_bytes for count, once, spec in zip(now, own, specs)]
        key = (op_of(node).name, stage)
        found[key] = max(found.get(key, (0, frees)), (profile.live_bytes[node], frees))
    return [*found.values()]


def _for_swapping(program: Program, specs: list[StageSpec], budget_bytes: int, resident: Collection[str]) -> list[str]:
    """Every stage but the device's last, whose weights need not leave between its forward and its backward; the last
    one as well where its saved tensors would not fit, or would take the room of early fetches."""
    able = [s.name for s in specs if s.rematerialisable]
    others = [name for name in able if name != specs[-1].name]
    if others == able:
        return able
    trial, moving = program.copy(), [s.name for s in specs if s.name not in resident]
    rematerialise(trial, set(others))
    early = look_ahead(trial, moving, budget_bytes)
    if bytes_with_fetches(trial, moving, early) > budget_bytes:
        return able
    rematerialise(trial, {specs[-1].name})
    return others if _count(early) >= _count(look_ahead(trial, moving, budget_bytes)) else able


def _count(early: Early) -> int:
    """The number of parameters fetched early."""
    return sum(sum(kinds.values()) for kinds in early.values())


def rematerialise(program: Program, stages: set[str]) -> None:
    """Drop the kept values of these stages' forwards, and have their backwards run the forward again."""
    graph = program.graph
    for node in list(program.ops()):
        if node.target is ops.forward and node.args[0] in stages and node.kwargs.get("keep", True):
            kept = values_of(node)[-1]
            for user in list(kept.users):
                if op_of(user).takes_kept:
                    user.update_arg(2, None)
                    _route_again(program, user)
                else:
                    user.args = tuple(arg for arg in user.args if arg is not kept)
            graph.erase_node(kept)
            node.kwargs = {**node.kwargs, "keep": False}
            infer(program, node)
    infer_all(program)
    place_frees(program)


def _route_again(program: Program, backward: fx.Node) -> None:
    """Let a backward read tokens that are sent to experts once more, in place of those that forward read."""
    inputs = op_of(backward).bind(backward.args, backward.kwargs)["inputs"]
    for value in inputs:
        if isinstance(value, fx.Node) and producer_of(value).target is ops.to_experts:
            with program.graph.inserting_before(backward):
                (again,) = program.emit(ops.to_experts, *value.args, names=[f"{value.name}_again"], **value.kwargs)
            backward.replace_input_with(value, again)
