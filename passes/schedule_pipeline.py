"""`schedule-pipeline`: one program per device, synchronous fill and drain (Mobius 3.1; GPipe where S = N).

In: stages on devices. Out: `draft.programs`: every device runs each of its stages forward on all micro-batches, in
stage order, then backward in reverse stage order. All weights are resident and all saved tensors kept; later passes
change that. The gradients are results of the step until `insert-optimizer` consumes them.

A value that several stages read is sent once per device. Its gradients are added on each reading device, sent back
once, and added again at the producer. Receives are issued in the order in which the peer sends, so no two streams can
wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.program import Interface, Program, StageSpec, TensorSpec, place_frees
from .base import Draft, Pass


@dataclass(frozen=True)
class SchedulePipeline(Pass):
    name: ClassVar[str] = "schedule-pipeline"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"

    def plan(self, draft: Draft) -> str:
        return "fill-drain"

    def rewrite(self, draft: Draft, decision: str) -> None:
        face = interface_of(draft)
        flow = Flow(face, draft.devices)
        draft.programs = [_Emitter(flow, device).step() for device in range(face.num_devices)]


def evaluation_programs(draft: Draft) -> list[Program]:
    """Forward only, in evaluation mode, on the same stages: every output of the model is a result."""
    flow = Flow(interface_of(draft), draft.devices)
    return [_Emitter(flow, device).evaluate() for device in range(flow.face.num_devices)]


def interface_of(draft: Draft) -> Interface:
    batch = {}
    for stage in draft.stages:
        for name in (n.name for n in stage.graph.graph.nodes if n.op == "placeholder"):
            if name in draft.graph.inputs:
                batch[name] = next(i for i in stage.spec.inputs if i.name == name)
    return Interface(
        stages={stage.spec.name: stage.spec for stage in draft.stages},
        batch=batch,
        num_devices=draft.hardware.num_devices,
        micro_batches=draft.options.micro_batches,
        state_bytes_per_param=draft.options.state_bytes_per_param,
        master=draft.options.precision in ("bf16", "fp16"),
    )


class Flow:
    """Which stage makes each value, which stages read it, and what therefore travels between which devices."""

    def __init__(self, face: Interface, devices: list[int]):
        self.face = face
        self.specs: list[StageSpec] = list(face.stages.values())
        self.device_of = {spec.name: device for spec, device in zip(self.specs, devices)}
        self.maker = {out.name: spec.name for spec in self.specs for out in spec.outputs}
        self.readers: dict[str, list[str]] = defaultdict(list)
        for spec in self.specs:
            for value in spec.inputs:
                if value.name in self.maker:
                    self.readers[value.name].append(spec.name)
        self.trained = {spec.name for spec in self.specs if any(o.requires_grad for o in spec.outputs)}
        self.sent = {d: self.sends(d) for d in range(face.num_devices)}

    def on(self, device: int) -> list[StageSpec]:
        return [spec for spec in self.specs if self.device_of[spec.name] == device]

    def rank(self, value: TensorSpec) -> int:
        """The position of the stage that makes a value."""
        return list(self.face.stages).index(self.maker[value.name])

    def reading_devices(self, value: str) -> list[int]:
        """Other devices that read a value, in the order of their first reading stage."""
        home = self.device_of[self.maker[value]]
        return list(dict.fromkeys(d for r in self.readers[value] if (d := self.device_of[r]) != home))

    def gradient_stage(self, value: str, device: int) -> str:
        """The stage whose backward completes the gradient of `value` on a reading device: its first reader there."""
        return next(r for r in self.readers[value] if self.device_of[r] == device)

    def sends(self, device: int, backward: bool = True) -> list[tuple[int, str]]:
        """(destination, tag) of all that a device sends, in issue order."""
        order: list[tuple[int, str]] = []
        for spec in self.on(device):
            for m in range(self.face.micro_batches):
                order += [(dst, f"{o.name}.m{m}") for o in spec.outputs for dst in self.reading_devices(o.name)]
        for spec in reversed(self.on(device)) if backward else ():
            for m in range(self.face.micro_batches):
                order += [
                    (self.device_of[self.maker[i.name]], f"d_{i.name}.m{m}") for i in self.gradients_sent(spec, device)
                ]
        return order

    def gradients_sent(self, spec: StageSpec, device: int) -> list[TensorSpec]:
        """Inputs of `spec` whose whole gradient on this device leaves for the producer after its backward."""
        return [
            i
            for i in spec.inputs
            if i.requires_grad
            and i.name in self.maker
            and spec.name in self.trained
            and self.device_of[self.maker[i.name]] != device
            and self.gradient_stage(i.name, device) == spec.name
        ]


class _Emitter:
    """Writes one device's program."""

    def __init__(self, flow: Flow, device: int):
        self.flow, self.device = flow, device
        self.face = flow.face
        self.program = Program(device, flow.face)
        self.weights: dict[str, fx.Node] = {}
        self.values: dict[str, fx.Node] = {}  # "h.m0", and gradients made here: "d_h.m0"
        self.arrived: dict[tuple[int, str], fx.Node] = {}
        self.kept: dict[str, fx.Node] = {}
        self.grads: dict[str, fx.Node] = {}
        self.losses: list[fx.Node] = []
        self.extras: dict[str, list[fx.Node]] = defaultdict(list)
        self.queues = {
            src: [tag for dst, tag in sent if dst == device] for src, sent in flow.sent.items() if src != device
        }

    def step(self) -> Program:
        mine = self.flow.on(self.device)
        for spec in mine:
            self.hold(spec)
            for m in range(self.face.micro_batches):
                self.forward(spec, m)
        for spec in reversed(mine):
            if spec.name in self.flow.trained:
                for m in range(self.face.micro_batches):
                    self.backward(spec, m)
        results = {"loss": self.losses} if self.losses else {}
        if self.grads:
            results["grads"] = [self.grads[s.name] for s in mine if s.name in self.grads]
        return self.finish(results)

    def evaluate(self) -> Program:
        self.program.function = "evaluate"
        sent = {d: self.flow.sends(d, backward=False) for d in range(self.face.num_devices)}
        self.queues = {s: [tag for dst, tag in rows if dst == self.device] for s, rows in sent.items()}
        for spec in self.flow.on(self.device):
            self.hold(spec)
            for m in range(self.face.micro_batches):
                self.predict(spec, m)
        results = {"loss": self.losses} if self.losses else {}
        return self.finish({**results, **self.extras})

    def finish(self, results: dict[str, list[fx.Node]]) -> Program:
        self.program.returns(results)
        place_frees(self.program)
        return self.program

    def hold(self, spec: StageSpec) -> None:
        (self.weights[spec.name],) = self.program.emit(
            ops.resident, f"{spec.name}.weights", names=[f"w{_number(spec)}"]
        )

    def forward(self, spec: StageSpec, m: int) -> None:
        inputs = self.inputs(spec, m)
        names = [f"{o.name}_m{m}" for o in spec.outputs]
        *outputs, self.kept[f"{spec.name}.m{m}"] = self.program.emit(
            ops.forward,
            spec.name,
            self.weights[spec.name],
            *inputs,
            micro_batch=m,
            names=[*names, f"kept{_number(spec)}_m{m}"],
        )
        self.outputs(spec, outputs, m)

    def predict(self, spec: StageSpec, m: int) -> None:
        inputs = self.inputs(spec, m)
        names = [f"{o.name}_m{m}" for o in (*spec.outputs, *spec.extra_outputs)]
        made = self.program.emit(ops.evaluate, spec.name, self.weights[spec.name], *inputs, micro_batch=m, names=names)
        self.outputs(spec, made[: len(spec.outputs)], m)
        for out, node in zip(spec.extra_outputs, made[len(spec.outputs) :]):
            self.extras[out.name] += self.program.emit(ops.offload, node, names=[f"{out.name}_m{m}_dram"])

    def inputs(self, spec: StageSpec, m: int) -> list[fx.Node]:
        """The stage's inputs on this device: received in the order in which they are made, or loaded."""
        for i in sorted((i for i in spec.inputs if i.name in self.flow.maker), key=self.flow.rank):
            if f"{i.name}.m{m}" not in self.values:
                src = self.flow.device_of[self.flow.maker[i.name]]
                self.values[f"{i.name}.m{m}"] = self.receive(src, f"{i.name}.m{m}")
        for i in spec.inputs:
            if i.name not in self.flow.maker and f"{i.name}.m{m}" not in self.values:
                (self.values[f"{i.name}.m{m}"],) = self.program.emit(
                    ops.load, self.program.batch, i.name, micro_batch=m, names=[f"{i.name}_m{m}"]
                )
        return [self.values[f"{i.name}.m{m}"] for i in spec.inputs]

    def outputs(self, spec: StageSpec, nodes: list[fx.Node], m: int) -> None:
        for out, node in zip(spec.outputs, nodes):
            self.values[f"{out.name}.m{m}"] = node
            if out.name == spec.loss:
                self.losses.append(node)
            for dst in self.flow.reading_devices(out.name):
                self.program.emit(ops.send, node, dst=dst, tag=f"{out.name}.m{m}")

    def receive(self, src: int, tag: str) -> fx.Node:
        """Take in everything that `src` sends up to `tag`, in its order."""
        while (src, tag) not in self.arrived:
            arriving = self.queues[src].pop(0)
            name, _, m = arriving.rpartition(".m")
            value = name.removeprefix("d_") if name not in self.flow.maker else name
            (self.arrived[src, arriving],) = self.program.emit(
                ops.recv, f"{self.flow.maker[value]}.{value}", src=src, tag=arriving, names=[f"{name}_m{m}"]
            )
        return self.arrived[src, tag]

    def backward(self, spec: StageSpec, m: int) -> None:
        douts = [self.gradient(spec, out, m) for out in spec.outputs]
        inputs = [self.values[f"{i.name}.m{m}"] for i in spec.inputs]
        wanted = [i for i in spec.inputs if i.requires_grad]
        *dinputs, self.grads[spec.name] = self.program.emit(
            ops.backward,
            spec.name,
            self.weights[spec.name],
            self.kept[f"{spec.name}.m{m}"],
            inputs,
            douts,
            self.grads.get(spec.name),
            micro_batch=m,
            names=[*(f"d_{i.name}_m{m}_s{_number(spec)}" for i in wanted), f"g{_number(spec)}_m{m}"],
        )
        for i, node in zip(wanted, dinputs):
            self.contribute(i.name, node, m)
        for i in self.flow.gradients_sent(spec, self.device):
            dst = self.flow.device_of[self.flow.maker[i.name]]
            self.program.emit(ops.send, self.values[f"d_{i.name}.m{m}"], dst=dst, tag=f"d_{i.name}.m{m}")

    def contribute(self, name: str, node: fx.Node, m: int) -> None:
        """Add one reader's gradient to those of the later readers on this device."""
        key = f"d_{name}.m{m}"
        if key in self.values:
            (node,) = self.program.emit(ops.add, self.values[key], node, names=[f"d_{name}_m{m}_sum"])
        self.values[key] = node

    def gradient(self, spec: StageSpec, out: TensorSpec, m: int) -> fx.Node | float | None:
        """The gradient of one output: 1 / M for the loss, else the sum over this device's and the others' readers."""
        if not out.requires_grad:
            return None
        if out.name == spec.loss:
            return 1.0 / self.face.micro_batches
        total = self.values.get(f"d_{out.name}.m{m}")
        for src in self.flow.reading_devices(out.name):
            arrived = self.receive(src, f"d_{out.name}.m{m}")
            if total is None:
                total = arrived
            else:
                (total,) = self.program.emit(ops.add, total, arrived, names=[f"d_{out.name}_m{m}_sum"])
        return total


def _number(spec: StageSpec) -> str:
    return spec.name.removeprefix("stage")
