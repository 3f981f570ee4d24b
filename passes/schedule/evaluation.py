"""Programs that evaluate: forward only, on the stages that a training step has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from ...ir import ops
from ...ir.program import Program, StageSpec, plan_arena, takes_turns
from ..draft import Draft
from ..memory.insert_fetch import Early, fetch_weights, look_ahead
from ..memory.insert_ssd import read_within
from ..memory.take_turns import number_fetches
from ..sharding.gathering import gather_weights
from .emitter import Emitter
from .flow import Flow, Placed
from .schedule import interface_of
from .timetable import ended_in_turn


def evaluation_programs(draft: Draft, fetch: Early | None = None) -> list[Program]:
    """Forward only, in evaluation mode, on the same stages: every output of the model is a result.

    `fetch`: the stages that training swaps (the decision of `insert-fetch`); here they are fetched, too, as early as
    memory allows beside the optimizer states of the others, in the arena of training. Weights on SSD are read
    into the arena of training in DRAM. Where fetches of training have turns on links, those here have some, too.
    """
    interface = draft.programs[0].interface if draft.programs else interface_of(draft)
    flow = Flow(interface, draft.devices, draft.copies, in_turn=False)
    order = ended_in_turn(flow, draft, {device: flow.forwards(device) for device in flow.devices})
    programs = [EvaluationEmitter(flow, device, order).write() for device in flow.devices]
    if draft.sharding is not None:
        for program in programs:
            gather_weights(program, draft.sharding.model_copy(update={"held": []}))
    for program, training in zip(programs, draft.programs) if fetch else ():
        mine = [stage.spec for stage in draft.stages_on(program.device)]
        swapped = [spec.name for spec in mine if spec.name in (fetch or {})]
        states = sum(program.interface.optimizer_bytes(spec) for spec in mine if spec.name not in swapped)
        budget = draft.lane_hardware.devices[program.device].budget_bytes
        if draft.sharding is None:
            arena_bytes = plan_arena(training)[1]  # it is there already: evaluation must not make it grow
            fetch_weights(program, look_ahead(program, swapped, budget, states, arena_bytes))
        if draft.ssd.stages:
            whole = [spec.name for spec in mine if draft.ssd.stages.get(spec.name) == "all"]
            read_within(program, whole, draft.ssd.ahead, plan_arena(training, ops.DRAM)[1])
    if any(map(takes_turns, draft.programs)):
        number_fetches(programs, draft.lane_hardware, draft.options.precision)
    return programs


class EvaluationEmitter(Emitter):
    """Writes forwards in evaluation mode: they save nothing and make every output of the model."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed]):
        super().__init__(flow, device, order)
        self.program.function = "evaluate"
        self.extras: dict[str, list[fx.Node]] = defaultdict(list)

    def forward(self, spec: StageSpec, m: int) -> None:
        inputs = self.inputs(spec, m)
        self.exchange(spec, spec.inputs, m)
        operands = (spec.name, self.weights[spec.name], *inputs)
        names = [f"{o.name}_m{m}" for o in (*spec.outputs, *spec.extra_outputs)]
        made = self.program.emit(ops.evaluate, *operands, micro_batch=m, names=names)
        self.outputs(spec, made[: len(spec.outputs)], m)
        for out, node in zip(spec.extra_outputs, made[len(spec.outputs) :]):
            of = next((e for e in spec.exchanges if e.source == out.name), None)
            node = node if of is None else self.made_by(of, node, m, f"{of.result.name}_m{m}")
            self.extras[out.name] += self.program.emit(ops.offload, node, names=[f"{out.name}_m{m}_dram"])

    def results(self) -> dict[str, list[fx.Node]]:
        return {**super().results(), **self.extras}
