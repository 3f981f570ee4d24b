"""`schedule-pipeline`: one program per device, synchronous fill and drain (Mobius 3.1; GPipe where S = N).

In: stages on devices. Out: `draft.programs`: every device runs each of its stages forward on all micro-batches, in
stage order, then backward in reverse stage order. All weights are resident and all saved tensors kept; later passes
change that. The gradients are results of the step until `insert-optimizer` consumes them.

A value that several stages read is sent once per device. Its gradients are added on each reading device, sent back
once, and added again at the producer. A device sends in the order of its turns and receives in the order in which all
devices' turns are expected to end: one order for all messages, so no two streams can wait for each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.hardware import Hardware
from ..runtime.memory import plan_arena
from ..runtime.program import Interface, Program, StageSpec, TensorSpec, place_frees
from .base import Draft, Pass, require_own
from .gathering import gather_weights
from .insert_fetch import Early, fetch_weights, look_ahead, state_bytes
from .insert_ssd import read_within


@dataclass(frozen=True)
class SchedulePipeline(Pass):
    name: ClassVar[str] = "schedule-pipeline"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"

    def plan(self, draft: Draft) -> str:
        return "fill-drain"

    def rewrite(self, draft: Draft, decision: str) -> None:
        require_own(self, "schedule", decision, self.plan(draft))
        flow = Flow(interface_of(draft), draft.devices)
        order = ended_in_turn(flow, draft.hardware, draft.options.precision)
        draft.programs = [Emitter(flow, device, order).step() for device in range(flow.face.num_devices)]


def evaluation_programs(
    draft: Draft, fetch: Early | None = None, ssd: Mapping[str, Any] | None = None
) -> list[Program]:
    """Forward only, in evaluation mode, on the same stages: every output of the model is a result.

    `fetch`: the stages that training swaps (the decision of `insert-fetch`); here they are fetched, too, as early as
    memory allows beside the optimizer states of the others, in the arena of training. `ssd`: what lies on SSD (the
    decision of `insert-ssd`); weights that do are read into the arena of training in DRAM.
    """
    face = draft.programs[0].interface if draft.programs else interface_of(draft)
    flow = Flow(face, draft.devices)
    ended = ended_in_turn(flow, draft.hardware, draft.options.precision)
    order = [row for row in ended if not row[1].is_backward]
    programs = [Emitter(flow, device, order).evaluate() for device in range(face.num_devices)]
    if draft.sharding is not None:
        for program in programs:
            gather_weights(program, replace(draft.sharding, held=()))
    for program, training in zip(programs, draft.programs) if fetch else ():
        mine = [stage.spec for stage in draft.stages_on(program.device)]
        swapped = [spec.name for spec in mine if spec.name in (fetch or {})]
        states = sum(state_bytes(program, spec) for spec in mine if spec.name not in swapped)
        budget = draft.hardware.devices[program.device].budget_bytes
        if draft.sharding is None:
            arena_bytes = plan_arena(training)[1]  # it is there already: evaluation must not make it grow
            fetch_weights(program, look_ahead(program, swapped, budget, states, arena_bytes))
        if ssd:
            whole = [spec.name for spec in mine if ssd["stages"].get(spec.name) == "all"]
            read_within(program, whole, ssd["ahead"], plan_arena(training, ops.DRAM)[1])
    return programs


def interface_of(draft: Draft) -> Interface:
    batch = {i.name: i for stage in draft.stages for i in stage.spec.inputs if i.name in draft.graph.inputs}
    return Interface(
        stages={stage.spec.name: stage.spec for stage in draft.stages},
        batch=batch,
        num_devices=draft.hardware.num_devices,
        micro_batches=draft.options.micro_batches,
        state_bytes_per_param=draft.options.state_bytes_per_param,
        states=_states(draft),
        master=draft.options.precision in ("bf16", "fp16"),
        lanes=tuple(tuple(lane) for lane in draft.lanes),
        shards=draft.shards,
    )


def _states(draft: Draft) -> dict[str, int]:
    """Bytes of optimizer states by stage, where they depend on shapes."""
    each = draft.options.state_bytes_of
    if each is None:
        return {}
    specs = [stage.spec for stage in draft.stages]
    return {s.name: sum(each(p.name, p.shape) for p in s.params if p.requires_grad) for s in specs}


@dataclass(frozen=True)
class Message:
    """A value of one micro-batch, or its gradient, on its way between two devices."""

    value: str
    micro_batch: int
    is_gradient: bool = False

    @property
    def tag(self) -> str:
        """No value's name holds a space or a dot, so no two messages share a tag."""
        return f"{'grad ' if self.is_gradient else ''}{self.value}.m{self.micro_batch}"

    @property
    def name(self) -> str:
        """What it is called in a program."""
        return f"{'d_' if self.is_gradient else ''}{self.value}_m{self.micro_batch}"


@dataclass(frozen=True)
class Turn:
    """One forward or backward: a stage and a micro-batch. `is_weight`: the second half of a backward that is split,
    for which nobody waits; `is_backward` is then the first, or a whole one."""

    stage: str
    micro_batch: int
    is_backward: bool = False
    is_weight: bool = False


Placed = tuple[int, Turn]  # on a device


class Flow:
    """Which stage makes each value, which stages read it, and what therefore travels between which devices.

    `turns`: per device what it runs, in order; None is fill and drain.
    """

    def __init__(self, face: Interface, devices: list[int], turns: Mapping[int, list[Turn]] | None = None):
        self.face = face
        self.specs: list[StageSpec] = list(face.stages.values())
        self.place = {spec.name: i for i, spec in enumerate(self.specs)}
        self.device_of = {spec.name: device for spec, device in zip(self.specs, devices)}
        self.maker = {out.name: spec.name for spec in self.specs for out in spec.outputs}
        self.readers: dict[str, list[str]] = defaultdict(list)
        self.learners: dict[str, list[str]] = defaultdict(list)  # readers that hand back a gradient
        for spec in self.specs:
            for value in spec.inputs:
                if value.name in self.maker:
                    self.readers[value.name].append(spec.name)
                    if value.requires_grad:
                        self.learners[value.name].append(spec.name)
        self.trained = {s.name for s in self.specs if s.trained_params or any(i.requires_grad for i in s.inputs)}
        everyone = range(face.num_devices)
        self.turns = {d: self.fill_drain(d) for d in everyone} if turns is None else dict(turns)

    def on(self, device: int) -> list[StageSpec]:
        return [spec for spec in self.specs if self.device_of[spec.name] == device]

    def reading_devices(self, value: str) -> list[int]:
        """Other devices that read a value, in the order of their first reading stage."""
        home = self.device_of[self.maker[value]]
        return list(dict.fromkeys(d for r in self.readers[value] if (d := self.device_of[r]) != home))

    def first_reader(self, value: str, device: int) -> str:
        return next(r for r in self.readers[value] if self.device_of[r] == device)

    def gradient_stage(self, value: str, device: int) -> str | None:
        """The stage whose backward completes the gradient of `value` on a reading device: its first reader there
        that has one."""
        return next((r for r in self.learners[value] if self.device_of[r] == device), None)

    def fill_drain(self, device: int) -> list[Turn]:
        """Stage by stage forward on all micro-batches, then backward in reverse stage order."""
        mine = [spec.name for spec in self.on(device)]
        todo = range(self.face.micro_batches)
        back = [name for name in reversed(mine) if name in self.trained]
        return [Turn(name, m) for name in mine for m in todo] + [Turn(name, m, True) for name in back for m in todo]

    def sends(self, device: int) -> list[tuple[int, Message]]:
        """(destination, message) of all that a device sends, in issue order."""
        return [row for turn in self.turns[device] for row in self.sent_by(turn)]

    def sent_by(self, turn: Turn) -> list[tuple[int, Message]]:
        """(destination, message) of what leaves the device behind one turn: what is read first leaves first."""
        spec, m = self.face.stages[turn.stage], turn.micro_batch
        if turn.is_weight:
            return []
        if not turn.is_backward:
            sent = [(dst, Message(o.name, m)) for o in spec.outputs for dst in self.reading_devices(o.name)]
            return sorted(sent, key=lambda row: self.place[self.first_reader(row[1].value, row[0])])
        gone = self.gradients_sent(spec, self.device_of[spec.name])
        back = [(self.device_of[self.maker[i.name]], Message(i.name, m, is_gradient=True)) for i in gone]
        return sorted(back, key=lambda row: -self.place[self.maker[row[1].value]])

    def needed(self, turn: Turn) -> list[tuple[Turn, TensorSpec]]:
        """The turns that make what a turn reads of other stages, and what that is."""
        spec, m = self.face.stages[turn.stage], turn.micro_batch
        if turn.is_backward:
            return [(Turn(reader, m, True), out) for out in spec.outputs for reader in self.learners[out.name]]
        return [(Turn(self.maker[i.name], m), i) for i in spec.inputs if i.name in self.maker]

    def gradients_sent(self, spec: StageSpec, device: int) -> list[TensorSpec]:
        """Inputs of `spec` whose whole gradient on this device leaves for the producer after its backward."""
        return [
            i
            for i in spec.inputs
            if i.requires_grad
            and i.name in self.maker
            and self.device_of[self.maker[i.name]] != device
            and self.gradient_stage(i.name, device) == spec.name
        ]


class Durations:
    """Expected seconds of turns and of the way of a value between devices."""

    def __init__(self, flow: Flow, hardware: Hardware, precision: str):
        self.flow, self.hardware = flow, hardware
        self.names = [device.name for device in hardware.devices]
        self.took_s = {spec.name: self.seconds(spec, precision) for spec in flow.specs}

    def seconds(self, spec: StageSpec, precision: str) -> tuple[float, float]:
        """Of a forward and a backward."""
        device = self.hardware.devices[self.flow.device_of[spec.name]]
        for name, forward_s, _, backward_s in spec.seconds:
            if name == device.name:
                return forward_s, backward_s
        forward_s = device.compute_s(spec.forward_flops, spec.forward_traffic_bytes, precision, spec.launches)
        if spec.name not in self.flow.trained:
            return forward_s, 0.0
        backward = (spec.backward_flops, spec.backward_traffic_bytes, precision, 2 * spec.launches)
        return forward_s, device.compute_s(*backward)

    def moving_s(self, src: int, dst: int, value: TensorSpec) -> float:
        if src == dst:
            return 0.0
        a, b = self.names[src], self.names[dst]
        return self.hardware.latency_s(a, b) + value.bytes / self.hardware.bandwidth(a, b)


def ended_in_turn(flow: Flow, hardware: Hardware, precision: str) -> list[Placed]:
    """All turns with their devices, in the order in which they end if every device keeps to its own order."""
    times, ended_s = Durations(flow, hardware, precision), dict[Turn, float]()
    waiting = {device: deque(turns) for device, turns in flow.turns.items() if turns}
    free_s = dict.fromkeys(waiting, 0.0)
    order: list[tuple[float, int, Placed]] = []
    while waiting:
        before = len(order)
        for device, turns in list(waiting.items()):
            while turns and all(made in ended_s for made, _ in flow.needed(turns[0])):
                turn = turns.popleft()
                arrived_s = [
                    ended_s[made] + times.moving_s(flow.device_of[made.stage], device, value)
                    for made, value in flow.needed(turn)
                ]
                free_s[device] = max([free_s[device], *arrived_s]) + times.took_s[turn.stage][turn.is_backward]
                ended_s[turn] = free_s[device]
                order.append((ended_s[turn], len(order), (device, turn)))
            if not turns:
                del waiting[device]
        assert len(order) > before, "devices wait for each other's turns"
    return [placed for _, _, placed in sorted(order, key=lambda row: row[:2])]


class Emitter:
    """Writes one device's program. `order`: all turns of all devices; messages come in as their turns come there."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed]):
        self.flow, self.device = flow, device
        self.face = flow.face
        self.program = Program(device, flow.face)
        self.weights: dict[str, fx.Node] = {}
        self.values: dict[Message, fx.Node] = {}  # inputs, and gradients made here
        self.arrived: dict[tuple[int, Message], fx.Node] = {}
        self.kept: dict[tuple[str, int], fx.Node] = {}
        self.grads: dict[str, fx.Node] = {}
        self.losses: list[fx.Node] = []
        self.extras: dict[str, list[fx.Node]] = defaultdict(list)
        sent = [(src, *row) for src, turn in order for row in flow.sent_by(turn)]
        self.arrivals = deque((src, message) for src, dst, message in sent if dst == device)

    def step(self) -> Program:
        for turn in self.flow.turns[self.device]:
            spec = self.face.stages[turn.stage]
            if spec.name not in self.weights:
                self.hold(spec)
            self.take(spec, turn)
        results = {"loss": self.losses} if self.losses else {}
        grads = [self.grads[s.name] for s in self.flow.on(self.device) if s.name in self.grads and s.trained_params]
        return self.finish({**results, "grads": grads} if grads else results)

    def take(self, spec: StageSpec, turn: Turn) -> None:
        (self.backward if turn.is_backward else self.forward)(spec, turn.micro_batch)

    def evaluate(self) -> Program:
        self.program.function = "evaluate"
        for turn in self.flow.turns[self.device]:
            spec = self.face.stages[turn.stage]
            if spec.name not in self.weights:
                self.hold(spec)
            if not turn.is_backward:
                self.predict(spec, turn.micro_batch)
        results = {"loss": self.losses} if self.losses else {}
        return self.finish({**results, **self.extras})

    def finish(self, results: dict[str, list[fx.Node]]) -> Program:
        self.program.returns(results)
        place_frees(self.program)
        return self.program

    def hold(self, spec: StageSpec) -> None:
        (self.weights[spec.name],) = self.program.emit(
            ops.resident, f"{spec.name}.weights", names=[f"w{number_of(spec)}"]
        )

    def forward(self, spec: StageSpec, m: int) -> None:
        operands = (spec.name, self.weights[spec.name], *self.inputs(spec, m))
        names = [*(f"{o.name}_m{m}" for o in spec.outputs), f"kept{number_of(spec)}_m{m}"]
        if spec.name in self.flow.trained:
            *outputs, kept = self.program.emit(ops.forward, *operands, micro_batch=m, names=names)
            self.kept[spec.name, m] = kept
        else:
            outputs = self.program.emit(ops.forward, *operands, micro_batch=m, keep=False, names=names)
        self.outputs(spec, outputs, m)

    def predict(self, spec: StageSpec, m: int) -> None:
        operands = (spec.name, self.weights[spec.name], *self.inputs(spec, m))
        names = [f"{o.name}_m{m}" for o in (*spec.outputs, *spec.extra_outputs)]
        made = self.program.emit(ops.evaluate, *operands, micro_batch=m, names=names)
        self.outputs(spec, made[: len(spec.outputs)], m)
        for out, node in zip(spec.extra_outputs, made[len(spec.outputs) :]):
            self.extras[out.name] += self.program.emit(ops.offload, node, names=[f"{out.name}_m{m}_dram"])

    def inputs(self, spec: StageSpec, m: int) -> list[fx.Node]:
        """The stage's inputs on this device, received or loaded."""
        for i in spec.inputs:
            message = Message(i.name, m)
            if message in self.values:
                continue
            if i.name in self.flow.maker:
                self.values[message] = self.receive(self.flow.device_of[self.flow.maker[i.name]], message)
            else:
                (self.values[message],) = self.program.emit(
                    ops.load, self.program.batch, i.name, micro_batch=m, names=[message.name]
                )
        return [self.values[Message(i.name, m)] for i in spec.inputs]

    def outputs(self, spec: StageSpec, nodes: list[fx.Node], m: int) -> None:
        for out, node in zip(spec.outputs, nodes):
            self.values[Message(out.name, m)] = node
            if out.name == spec.loss:
                self.losses.append(node)
        self.send(Turn(spec.name, m))

    def send(self, turn: Turn) -> None:
        for dst, message in self.flow.sent_by(turn):
            self.program.emit(ops.send, self.values[message], dst=dst, tag=message.tag)

    def receive(self, src: int, wanted: Message) -> fx.Node:
        """Take in everything that comes before `wanted`, from whichever device."""
        while (src, wanted) not in self.arrived:
            peer, message = self.arrivals.popleft()
            like = f"{self.flow.maker[message.value]}.{message.value}"
            (self.arrived[peer, message],) = self.program.emit(
                ops.recv, like, src=peer, tag=message.tag, names=[message.name]
            )
        return self.arrived[src, wanted]

    def backward(self, spec: StageSpec, m: int) -> None:
        douts = [self.gradient(spec, out, m) for out in spec.outputs]
        wanted = [i for i in spec.inputs if i.requires_grad]
        *dinputs, self.grads[spec.name] = self.program.emit(
            ops.backward,
            spec.name,
            self.weights_of_backward(spec, m),
            self.kept.get((spec.name, m)),
            [self.values[Message(i.name, m)] for i in spec.inputs],
            douts,
            self.grads.get(spec.name),
            micro_batch=m,
            names=[*(f"d_{i.name}_m{m}_s{number_of(spec)}" for i in wanted), f"g{number_of(spec)}_m{m}"],
        )
        self.hand_back(spec, m, dinputs)

    def hand_back(self, spec: StageSpec, m: int, dinputs: Sequence[fx.Node]) -> None:
        """The gradients of a stage's inputs, to who made these."""
        for i, node in zip((i for i in spec.inputs if i.requires_grad), dinputs):
            self.contribute(Message(i.name, m, is_gradient=True), node)
        self.send(Turn(spec.name, m, is_backward=True))

    def weights_of_backward(self, spec: StageSpec, m: int) -> fx.Node:
        return self.weights[spec.name]

    def contribute(self, message: Message, node: fx.Node) -> None:
        """Add one reader's gradient to those of the later readers on this device."""
        if message in self.values:
            (node,) = self.program.emit(ops.add, self.values[message], node, names=[f"{message.name}_sum"])
        self.values[message] = node

    def gradient(self, spec: StageSpec, out: TensorSpec, m: int) -> fx.Node | float | None:
        """The gradient of one output: 1 / M for the loss, else the sum over this device's and the others' readers."""
        if not out.requires_grad:
            return None
        if out.name == spec.loss:
            return 1.0 / self.face.total_micro_batches
        message = Message(out.name, m, is_gradient=True)
        total = self.values.get(message)
        for src in self.flow.reading_devices(out.name):
            if self.flow.gradient_stage(out.name, src) is None:
                continue
            arrived = self.receive(src, message)
            if total is None:
                total = arrived
            else:
                (total,) = self.program.emit(ops.add, total, arrived, names=[f"{message.name}_sum"])
        return total


def number_of(spec: StageSpec) -> str:
    return spec.name.removeprefix("stage")
