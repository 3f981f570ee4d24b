"""Writes one device's program: forwards and backwards of its stages in a given order, and the messages between."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from torch import fx

from ...ir import ops
from ...ir.precision import PRECISIONS
from ...ir.program import Interface, Program, StageSpec, TensorSpec, place_frees
from ..draft import Draft
from .flow import Flow, Message, Placed, Turn


def interface_of(draft: Draft) -> Interface:
    batch = {i.name: i for stage in draft.stages for i in stage.spec.inputs if i.name in draft.graph.inputs}
    return Interface(
        stages={stage.spec.name: stage.spec for stage in draft.stages},
        batch=batch,
        num_devices=draft.hardware.num_devices,
        micro_batches=draft.options.micro_batches,
        state_bytes_per_param=draft.options.state_bytes_per_param,
        states=_states(draft),
        master=PRECISIONS[draft.options.precision].has_masters,
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


class Emitter:
    """Writes one device's program. `order`: all turns of all devices; messages come in as their turns come there."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed]):
        self.flow, self.device = flow, device
        self.interface = flow.interface
        self.program = Program(device, flow.interface)
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
            spec = self.interface.stages[turn.stage]
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
            spec = self.interface.stages[turn.stage]
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
            return 1.0 / self.interface.total_micro_batches
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
