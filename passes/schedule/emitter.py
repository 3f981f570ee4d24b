"""Writes one device's program: forwards and backwards of its stages in a given order, and the messages between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import fx

from ...graph.divide.exchanges import MEMBER
from ...ir import ops
from ...ir.program import Exchange, Program, StageSpec, TensorSpec, place_frees
from .flow import Action, Flow, Message, Placed, Turn


class Emitter:
    """Writes one device's program. `order`: the turns of all devices. The device's own turns are written in that order,
    and messages arrive in the order of the turns that send them."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed]):
        self.flow, self.device = flow, device
        self.interface = flow.interface
        self.program = Program(device, flow.interface)
        self.own = [action for at, action in order if at == device]
        self.keeping = flow.trained  # stages whose forward saves tensors
        self.split = {turn.stage for turn in self.own if isinstance(turn, Turn) and turn.is_weight}
        self.weights: dict[str, fx.Node] = {}
        self.values: dict[Message, fx.Node] = {}  # inputs, and gradients made here
        self.arrived: dict[tuple[int, Message], fx.Node] = {}
        self.kept: dict[tuple[str, int], fx.Node] = {}
        self.rests: dict[tuple[str, int], fx.Node] = {}  # what the first half of a backward leaves to the second
        self.grads: dict[str, fx.Node] = {}
        self.losses: list[fx.Node] = []
        self.own_number: fx.Node | None = None
        self.come_back: dict[Message, fx.Node] = {}  # keys and values that go round a second time, for backward
        sent = [(src, *row) for src, turn in order if isinstance(turn, Turn) for row in flow.sent_by(turn)]
        self.arrivals = deque((src, message) for src, dst, message in sent if dst == device)

    def write(self) -> Program:
        for action in self.own:
            self.take(action)
        self.program.returns(self.results())
        place_frees(self.program)
        return self.program

    def take(self, action: Action) -> None:
        assert isinstance(action, Turn), "updates are for asynchronous schedules"
        spec = self.interface.stages[action.stage]
        if spec.name not in self.weights:
            self.hold(spec)
        write = self.backward_weight if action.is_weight else self.backward if action.is_backward else self.forward
        write(spec, action.micro_batch)

    def results(self) -> dict[str, list[fx.Node]]:
        grads = [self.grads[s.name] for s in self.flow.on(self.device) if s.name in self.grads and s.trained_params]
        return {name: nodes for name, nodes in (("loss", self.losses), ("grads", grads)) if nodes}

    def hold(self, spec: StageSpec) -> None:
        (self.weights[spec.name],) = self.program.emit(
            ops.resident, f"{spec.name}.weights", names=[f"w{number_of(spec)}"]
        )

    def forward(self, spec: StageSpec, m: int) -> None:
        inputs = self.inputs(spec, m)
        self.exchange(spec, spec.inputs, m)
        operands = (spec.name, self.weights_of_forward(spec, m), *inputs)
        names = [*(f"{o.name}_m{m}" for o in spec.outputs), f"kept{number_of(spec)}_m{m}"]
        is_kept = spec.name in self.keeping and not spec.is_free_again
        fields = {} if is_kept else {"keep": False}
        made = self.program.emit(ops.forward, *operands, micro_batch=m, names=names, **fields)
        if is_kept:
            self.kept[spec.name, m] = made.pop()
        self.outputs(spec, made, m)

    def weights_of_forward(self, spec: StageSpec, m: int) -> fx.Node:
        return self.weights[spec.name]

    def inputs(self, spec: StageSpec, m: int) -> list[fx.Node]:
        """The stage's inputs on this device, received or loaded."""
        for i in spec.inputs:
            message = Message(i.name, m)
            if message in self.values:
                continue
            if i.name == MEMBER:
                self.values[message] = self.member()
            elif i.name in self.flow.maker:
                self.values[message] = self.receive(self.flow.device_at(self.flow.maker[i.name], m), message)
            else:
                (self.values[message],) = self.program.emit(
                    ops.load, self.program.batch, i.name, micro_batch=m, names=[message.name]
                )
        return [self.values[Message(i.name, m)] for i in spec.inputs]

    def member(self) -> fx.Node:
        """The device's number in its team."""
        if self.own_number is None:
            (self.own_number,) = self.program.emit(ops.member, group=ops.TEAM, names=[MEMBER])
        return self.own_number

    def outputs(self, spec: StageSpec, nodes: list[fx.Node], m: int) -> None:
        for out, node in zip(spec.outputs, nodes):
            self.values[Message(out.name, m)] = node
        self.exchange(spec, spec.outputs, m)
        if spec.loss is not None:
            whole = next((e.result.name for e in spec.exchanges if e.source == spec.loss), spec.loss)
            self.losses.append(self.values[Message(whole, m)])
        self.send(Turn(spec.name, m))

    def exchange(self, spec: StageSpec, sources: Sequence[TensorSpec], m: int) -> None:
        """Write what the team makes of these values of a stage, and of what it makes of them."""
        names = {source.name for source in sources}
        for e in spec.exchanges:
            if e.source in names:
                names.add(e.result.name)
                given, made = self.values[Message(e.source, m)], Message(e.result.name, m)
                self.values[made] = self.made_by(e, given, m, made.name)

    def made_by(self, e: Exchange, value: fx.Node, m: int, name: str, is_back: bool = False) -> fx.Node:
        """The result of a team's exchange of a value, or of its gradient; without an op, the value itself."""
        op, fields = (e.back, e.back_fields) if is_back else (e.op, e.fields)
        if not op:
            return value
        operands = [value, self.values[Message(e.routes, m)]] if e.routes else [value]
        (node,) = self.program.emit(ops.ALL[op], *operands, group=ops.TEAM, **dict(fields), names=[name])
        return node

    def send(self, turn: Turn) -> None:
        for dst, message in self.flow.sent_by(turn):
            self.program.emit(ops.send, self.values[message], dst=dst, tag=message.tag)

    def receive(self, src: int, wanted: Message) -> fx.Node:
        """Receive `wanted` and all messages that come before it, from whichever device."""
        while (src, wanted) not in self.arrived:
            peer, message = self.arrivals.popleft()
            like = f"{self.flow.maker[message.value]}.{message.value}"
            (self.arrived[peer, message],) = self.program.emit(
                ops.recv, like, src=peer, tag=message.tag, names=[message.name]
            )
        return self.arrived[src, wanted]

    def backward(self, spec: StageSpec, m: int) -> None:
        """Write a whole backward, or the half that others wait for."""
        for e in spec.exchanges:
            if e.source not in {value.name for value in spec.made}:
                self.exchange_gradient(spec, e, m)
        douts = [self.gradient(spec, out, m) for out in spec.outputs]
        self.send_again(spec, m)
        inputs = [None if i is None else self.input_again(i.name, m) for i in spec.backward_inputs]
        kept = self.kept.get((spec.name, m))
        operands = (spec.name, self.weights_of_backward(spec, m), kept, inputs, douts)
        wanted = [i for i in spec.inputs if i.requires_grad]
        names = [f"d_{i.name}_m{m}_s{number_of(spec)}" for i in wanted]
        if spec.name in self.split:
            names.append(f"rest{number_of(spec)}_m{m}")
            made = self.program.emit(ops.backward_input, *operands, micro_batch=m, names=names)
            *dinputs, self.rests[spec.name, m] = made
        else:
            names.append(f"g{number_of(spec)}_m{m}")
            made = self.program.emit(ops.backward, *operands, self.grads.get(spec.name), micro_batch=m, names=names)
            *dinputs, self.grads[spec.name] = made
        for i, node in zip(wanted, dinputs):
            self.contribute(Message(i.name, m, is_gradient=True), node)
        for given, output in spec.handed:
            whole = next(dout for dout, out in zip(douts, spec.outputs) if out.name == output)
            if isinstance(whole, fx.Node):
                self.contribute(Message(given, m, is_gradient=True), whole)
        self.send(Turn(spec.name, m, is_backward=True))

    # --- rings in backward

    def sent_again(self, spec: StageSpec, m: int) -> list[str]:
        """The inputs of a stage that go round again for its backward, in place of being kept since its forward. None on
        a device that has a part of the ring's stages."""
        return [i.name for i in spec.inputs if i.name in self.flow.round_of(i.name, self.device, m)[1:]]

    def input_again(self, name: str, m: int) -> fx.Node:
        """An input as backward takes it."""
        return self.come_back.get(Message(name, m), self.values[Message(name, m)])

    def send_again(self, spec: StageSpec, m: int) -> None:
        """Write what a stage's backward needs of a ring, and what the backward after it will, so that this is on its
        way meanwhile. Backward takes the last of them first, so they come the other way round; that one is made of the
        members' own, from which it is N - 1 steps forward, or one back."""
        for name in self.sent_again(spec, m):
            names = self.flow.round_of(name, self.device, m)
            place = names.index(name)
            if Message(name, m) not in self.come_back:
                self.go_round(names, 0, place, m)
            earlier = next((i for i in range(place - 1, 0, -1) if names[i] in self.flow.readers), None)
            if earlier is not None:
                self.go_round(names, place, earlier, m)

    def go_round(self, names: Sequence[str], begin: int, end: int, m: int) -> None:
        """Write the steps from one value of a ring to another, whichever way is shorter."""
        size, value = self.interface.team, self.input_again(names[begin], m)
        back = (begin - end) % size <= (end - begin) % size
        for at in range(begin - 1, end - 1 - size * (end > begin), -1) if back else range(begin + 1, end + 1):
            name = f"{names[end]}_m{m}_again" if at % size == end else f"{names[end]}_m{m}_by_{at % size}"
            fields = {"back": 1} if back else {}
            (value,) = self.program.emit(ops.pass_on, value, group=ops.TEAM, **fields, names=[name])
        self.come_back[Message(names[end], m)] = value

    def backward_weight(self, spec: StageSpec, m: int) -> None:
        operands = (spec.name, self.weights[spec.name], self.rests[spec.name, m], self.grads.get(spec.name))
        names = [f"g{number_of(spec)}_m{m}"]
        (self.grads[spec.name],) = self.program.emit(ops.backward_weight, *operands, micro_batch=m, names=names)

    def weights_of_backward(self, spec: StageSpec, m: int) -> fx.Node:
        return self.weights[spec.name]

    def contribute(self, message: Message, node: fx.Node) -> None:
        """Add one reader's gradient to those of the later readers on this device."""
        if message in self.values:
            (node,) = self.program.emit(ops.add, self.values[message], node, names=[f"{message.name}_sum"])
        self.values[message] = node

    def gradient(self, spec: StageSpec, out: TensorSpec, m: int) -> fx.Node | float | None:
        """The gradient of one output: 1 / M for the loss, where M micro-batches make an update; else the sum over this
        device's and the others' readers."""
        if not out.requires_grad:
            return None
        if out.name == spec.loss:
            return 1.0 / self.interface.micro_batches_of_update
        for e in spec.exchanges:
            if e.source == out.name:
                self.exchange_gradient(spec, e, m)
        message = Message(out.name, m, is_gradient=True)
        total = self.values.get(message)
        for src in self.flow.reading_devices(out.name, m):
            if self.flow.gradient_stage(out.name, src, m) is None:
                continue
            arrived = self.receive(src, message)
            if total is None:
                total = arrived
            else:
                (total,) = self.program.emit(ops.add, total, arrived, names=[f"{message.name}_sum"])
        return total

    def exchange_gradient(self, spec: StageSpec, e: Exchange, m: int) -> None:
        """Add to the gradient of an exchanged value what comes of that of its result."""
        given = self.gradient(spec, e.result, m) if e.result.requires_grad else None
        if isinstance(given, fx.Node):
            name = f"d_{e.source}_m{m}_of_{e.result.name}"
            made = self.made_by(e, given, m, name, is_back=True)
            self.contribute(Message(e.source, m, is_gradient=True), made)


def number_of(spec: StageSpec) -> str:
    return spec.name.removeprefix("stage")
