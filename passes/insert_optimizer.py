"""`insert-optimizer`: the gradients that the programs return are reduced, clipped and used.

In: programs whose results hold every stage's gradients. Out: programs that update the weights. A stage that lives in
DRAM offloads its gradients as soon as its last backward is done and is stepped there, on fp32 master weights, under
the backward of the stages before it (Mobius eq. 1); a resident stage is stepped on its device, at the end, when that
waits for other devices least. The parts of a tied parameter are summed across the stages that share it (`all_reduce`
over one group per parameter), and each stage then updates its own copy by the same arithmetic. Clipping needs the
norm over all devices: every step waits for it.

Where every device runs the whole model, the gradients of a stage are summed over the devices right behind its last
backward (`all_reduce`), and each device steps its own copy; where stages are spread over the devices, the sum is
scattered (`reduce_scatter`) and each device offloads and steps its shard.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import homes_of
from ..runtime.program import Program, place_frees
from .base import EVERYWHERE, REPLICAS, SHARDS, Draft, Pass

UNCLIPPED = 1e30  # a norm that no finite gradient reaches, where only the loss scale is to be taken out
Group = tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class InsertOptimizer(Pass):
    name: ClassVar[str] = "insert-optimizer"
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers")
    gives: ClassVar[tuple[str, ...]] = ("optimizer",)
    decides: ClassVar[str] = "optimizer"

    def plan(self, draft: Draft) -> dict[str, str]:
        """Stage to where it is stepped: "device" with resident weights, "dram" with swapped ones."""
        where: dict[str, str] = {}
        for program in draft.programs:
            for stage, home in homes_of(program).items():
                where.setdefault(stage, home.weights)
        return {stage.spec.name: where[stage.spec.name] for stage in draft.stages if stage.spec.name in where}

    def rewrite(self, draft: Draft, decision: dict[str, str]) -> None:
        for stage, memory in self.plan(draft).items():
            if stage not in decision:
                raise PassError(f"optimizer says nothing of {stage}; it is stepped on {memory}")
            if decision[stage] != memory:
                how = "resident" if memory == ops.DEVICE else "fetched"
                raise PassError(f"{stage} is {how}, so it is stepped on {memory}; optimizer says {decision[stage]!r}")
        options = draft.options
        scaled = options.precision == "fp16"
        groups = tie_groups(draft)
        clip = options.max_grad_norm if options.max_grad_norm is not None else UNCLIPPED if scaled else None
        there = draft.programs[0].interface.groups
        if clip is not None and REPLICAS not in there:
            groups["world"] = tuple((p.device, "", "") for p in draft.programs)
        for program in draft.programs:
            program.with_interface(groups={**there, **groups})
        for program in draft.programs:
            _Updates(program, groups, decision, clip, scaled).emit()


def tie_groups(draft: Draft) -> dict[str, Group]:
    """Group name to its members (device, stage, parameter name), for each trained parameter in several stages. Where
    stages are everywhere, each device has groups of its own: it adds up what was summed over the devices before."""
    ties = draft.graph.ties()
    members: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for stage, home in zip(draft.stages, draft.devices):
        for param in stage.spec.params:
            name = ties.get(param.name, param.name)
            homes = {f"tie.{name}": home}
            if home == EVERYWHERE:
                homes = {f"tie.{name}.{device}": device for device in range(draft.hardware.num_devices)}
            for group, device in homes.items():
                if param.requires_grad:
                    members[group].append((device, stage.spec.name, param.name))
    return {group: tuple(rows) for group, rows in members.items() if len(rows) > 1}


class _Updates:
    """Writes the update part of one program."""

    def __init__(
        self, program: Program, groups: dict[str, Group], where: dict[str, str], clip: float | None, scaled: bool
    ):
        self.program, self.groups, self.where = program, groups, where
        self.max_norm, self.scaled = clip, scaled
        self.grads = {str(n.meta["type"].stage): n for n in program.results().get("grads", [])}

    def emit(self) -> None:
        results = self.program.results()
        results.pop("grads", None)
        self.program.returns(results)
        output = next(reversed(self.program.graph.nodes))
        tied = {stage for rows in self.groups.values() for _, stage, _ in rows if stage}
        waiting = []  # stages whose step needs something from other devices, or the compute stream once it is idle
        for stage, grads in list(self.grads.items()):
            swapped = self.where[stage] == ops.DRAM
            name = f"g{stage.removeprefix('stage')}"
            if SHARDS in self.program.interface.groups:
                self.grads[stage] = self.behind(grads, ops.reduce_scatter, grads, name=f"{name}_shard", group=SHARDS)
            elif len(self.program.interface.groups.get(REPLICAS, ())) > 1:
                self.grads[stage] = self.behind(grads, ops.all_reduce, grads, name=f"{name}_all", group=REPLICAS)
            if swapped:
                grads = self.grads[stage]
                self.grads[stage] = self.behind(grads, ops.offload, grads, name=f"{name}_dram")
            if swapped and self.max_norm is None and stage not in tied:
                self.behind(self.grads[stage], ops.step, stage, self.grads[stage])
            else:
                waiting.append(stage)
        with self.program.graph.inserting_before(output):
            self.reduce_ties()
            norm = self.norm() if self.max_norm is not None else None
            for stage in waiting:
                self.update(stage, norm)
        place_frees(self.program)

    def update(self, stage: str, norm: fx.Node | None) -> None:
        grads = self.grads[stage]
        if norm is not None and self.max_norm is not None:
            name = f"g{stage.removeprefix('stage')}_clipped"
            (grads,) = self.program.emit(ops.clip, grads, norm, names=[name], max_norm=float(self.max_norm))
        self.program.emit(ops.step, stage, grads, *([norm] if self.scaled else []))

    def behind(self, place: fx.Node, op: ops.Op, *args: object, name: str = "", **fields: str) -> fx.Node:
        """Insert one op right behind a value; its result."""
        with self.program.graph.inserting_after(place):
            node = self.program.graph.call_function(op, args, dict(fields))  # type: ignore[arg-type]
        made = self.program.bind_results(node, [name] if name else [])
        return made[0] if made else node

    def reduce_ties(self) -> None:
        for group, rows in self.groups.items():
            mine = [stage for device, stage, _ in rows if device == self.program.device and stage]
            if not mine:
                continue
            names = [f"g{stage.removeprefix('stage')}_summed" for stage in mine]
            reduced = self.program.emit(ops.all_reduce, *(self.grads[s] for s in mine), names=names, group=group)
            self.grads.update(zip(mine, reduced))

    def norm(self) -> fx.Node:
        """The sum of squares over all devices, wherever their gradients lie."""
        grads = list(self.grads.values())
        (own,) = self.program.emit(ops.norm, *grads, names=["norm"])
        if "world" not in self.groups:  # every device has all gradients
            return own
        (total,) = self.program.emit(ops.all_reduce, own, names=["norm_world"], group="world")
        return total
