"""`insert-remat`: backward of a stage runs its forward again instead of keeping saved tensors (Mobius 3.1, FTPipe 4.3).

In: programs. Out: the same programs in which the decided stages forward with `keep=False` and whose backward takes no
`kept`. A stage is rematerialised only if its device would otherwise exceed its memory, largest saved tensors first.
Where not even that lets all weights stay resident, every stage but the device's last is, since their weights leave in
between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import profile_memory
from ..runtime.program import Program, StageSpec, infer, infer_all, place_frees, values_of
from .base import Draft, Pass


@dataclass(frozen=True)
class InsertRemat(Pass):
    name: ClassVar[str] = "insert-remat"
    needs: ClassVar[tuple[str, ...]] = ("programs",)
    gives: ClassVar[tuple[str, ...]] = ("remat",)
    decides: ClassVar[str] = "rematerialise"

    def plan(self, draft: Draft) -> list[str]:
        """Names of the stages to rematerialise."""
        chosen: list[str] = []
        for program in draft.programs:
            budget = draft.hardware.devices[program.device].budget_bytes
            chosen += stages_to_rematerialise(program, [s.spec for s in draft.stages_on(program.device)], budget)
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


def stages_to_rematerialise(program: Program, specs: list[StageSpec], budget_bytes: int) -> list[str]:
    """The fewest bytes of saved tensors to give up so that the resident program fits; else all but the last stage's."""
    states = sum(
        int(program.interface.state_bytes_per_param * s.trained_params)
        + 4 * s.trained_params * program.interface.master
        for s in specs
    )

    def fits(names: list[str]) -> bool:
        trial = program.copy()
        rematerialise(trial, set(names))
        return profile_memory(trial).peak_bytes[ops.DEVICE] + states <= budget_bytes

    able = [s for s in specs if s.rematerialisable]
    by_size = sorted(able, key=lambda s: -s.kept_bytes)
    resident = sum(s.weight_bytes + s.grad_bytes for s in specs) + states
    if resident <= budget_bytes:
        for count in range(len(by_size) + 1):
            names = [s.name for s in by_size[:count]]
            if fits(names):
                return names
    swapped = [s.name for s in able if s is not specs[-1]]
    last = specs[-1:]
    tight = sum(s.kept_bytes * program.interface.micro_batches + 2 * s.weight_bytes for s in last) > budget_bytes // 2
    return [*swapped, *(s.name for s in last if tight and s.rematerialisable)]


def rematerialise(program: Program, stages: set[str]) -> None:
    """Drop the kept values of these stages' forwards, and have their backwards run the forward again."""
    graph = program.graph
    for node in list(program.ops()):
        if node.target is ops.forward and node.args[0] in stages and node.kwargs.get("keep", True):
            kept = values_of(node)[-1]
            for user in list(kept.users):
                if user.target is ops.backward:
                    user.update_arg(2, None)
                else:
                    user.args = tuple(arg for arg in user.args if arg is not kept)
            graph.erase_node(kept)
            node.kwargs = {**node.kwargs, "keep": False}
            infer(program, node)
    infer_all(program)
    place_frees(program)
