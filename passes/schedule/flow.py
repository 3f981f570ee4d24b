"""The turns of devices in a step, and the values that turns read and write: the stage that makes each, the stages that
need it, and the messages between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ir import ops
from ...ir.program import Interface, StageSpec, TensorSpec


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
        """The value's name in a program."""
        return f"{'d_' if self.is_gradient else ''}{self.value}_m{self.micro_batch}"


class Turn(NamedTuple):
    """One forward or backward of one micro-batch of a stage. `is_backward`: a whole backward, or the first half of a
    split one; `is_weight`: the second half, for which no other stage waits."""

    stage: str
    micro_batch: int
    is_backward: bool = False
    is_weight: bool = False


@dataclass(frozen=True)
class AsyncUpdate:
    """The update of a stage with one mini-batch's gradients, of its own parameters or of those that it shares."""

    stage: str
    mini_batch: int
    is_shared: bool = False


@dataclass(frozen=True)
class Share:
    """The sum of one mini-batch's gradients of parameters that these stages of a device share. It is taken as soon as
    all of the gradients are there, so that no update waits for it."""

    stages: tuple[str, ...]
    mini_batch: int


StageAction = Turn | AsyncUpdate  # only asynchronous schedules have updates between turns
Action = StageAction | Share
Placed = tuple[int, Action]  # the device, and what it does


def _rounds(specs: Sequence[StageSpec]) -> dict[str, tuple[str, ...]]:
    """For each value that goes round a ring, and round again for backward, all that it is on its way, its own members'
    first."""
    passed = [e for spec in specs for e in spec.exchanges if e.op == ops.pass_on.name and not e.lasts]
    following = {e.source: e.result.name for e in passed}
    found: dict[str, tuple[str, ...]] = {}
    for first in following.keys() - set(following.values()):
        names = [first]
        while names[-1] in following:
            names.append(following[names[-1]])
        found.update(dict.fromkeys(names, tuple(names)))
    return found


class Flow:
    """The maker and the readers of each value among stages, and so the messages between devices.

    `copies`: the devices of stages that several run; micro-batches go to these `in_turn`, or each device takes its
    neighbours, so that results come in the order of the batch.
    `trained`: the stages that have a backward; `closing`: for each stage the first trained one from it on, whose
    backward frees what the stage's forward makes.
    """

    def __init__(
        self,
        interface: Interface,
        devices: Sequence[int],
        copies: Mapping[str, Sequence[int]] | None = None,
        in_turn: bool = True,
    ):
        self.interface, self.in_turn = interface, in_turn
        self.devices = range(interface.num_devices)
        self.specs: list[StageSpec] = list(interface.stages.values())
        self.place = {spec.name: i for i, spec in enumerate(self.specs)}
        self.device_of = {spec.name: device for spec, device in zip(self.specs, devices)}
        self.copies = {name: list((copies or {}).get(name, [device])) for name, device in self.device_of.items()}
        self.maker = {out.name: spec.name for spec in self.specs for out in spec.made}
        self.rounds = _rounds(self.specs)
        self.readers: dict[str, list[str]] = defaultdict(list)
        self.learners: dict[str, list[str]] = defaultdict(list)  # readers that hand back a gradient
        for spec in self.specs:
            for value in spec.inputs:
                if value.name in self.maker:
                    self.readers[value.name].append(spec.name)
                    if value.requires_grad or value.name in dict(spec.handed):
                        self.learners[value.name].append(spec.name)
        self.trained = {s.name for s in self.specs if s.trained_params or any(i.requires_grad for i in s.inputs)}
        self.closing: dict[str, str | None] = {}
        closing: str | None = None
        for spec in reversed(self.specs):
            closing = self.closing[spec.name] = spec.name if spec.name in self.trained else closing

    def round_of(self, value: str, device: int, micro_batch: int) -> tuple[str, ...]:
        """The values that a ring makes of one, itself first, if `value` is among these and all stages that read them on
        this micro-batch are on this device; else none."""
        found = self.rounds.get(value, ())
        readers = {self.device_at(reader, micro_batch) for name in found for reader in self.readers[name]}
        return found if readers == {device} else ()

    def on(self, device: int) -> list[StageSpec]:
        return [spec for spec in self.specs if device in self.copies[spec.name]]

    def device_at(self, stage: str, micro_batch: int) -> int:
        """The device that runs a stage on a micro-batch."""
        copies = self.copies[stage]
        if self.in_turn:
            return copies[micro_batch % len(copies)]
        return copies[micro_batch * len(copies) // self.interface.micro_batches]

    def reading_devices(self, value: str, micro_batch: int) -> list[int]:
        """Other devices that read a value, in the order of their first reading stage."""
        home = self.device_at(self.maker[value], micro_batch)
        return list(dict.fromkeys(d for r in self.readers[value] if (d := self.device_at(r, micro_batch)) != home))

    def first_reader(self, message: Message, device: int) -> str:
        return next(r for r in self.readers[message.value] if self.device_at(r, message.micro_batch) == device)

    def gradient_stage(self, value: str, device: int, micro_batch: int) -> str | None:
        """The stage whose backward completes the gradient of `value` on a reading device: its first reader there that
        hands a gradient back."""
        return next((r for r in self.learners[value] if self.device_at(r, micro_batch) == device), None)

    def forwards(self, device: int) -> list[Turn]:
        """The forwards of a device, stage by stage, each on all of the device's micro-batches."""
        return [Turn(spec.name, m) for spec in self.on(device) for m in self.micro_batches(spec.name, device)]

    def micro_batches(self, stage: str, device: int) -> list[int]:
        """The micro-batches on which a device runs a stage."""
        return [m for m in range(self.interface.micro_batches) if self.device_at(stage, m) == device]

    def sent_by(self, turn: Turn) -> list[tuple[int, Message]]:
        """(destination, message) of what leaves the device after one turn: what is read first leaves first."""
        spec, m = self.interface.stages[turn.stage], turn.micro_batch
        if turn.is_weight:
            return []
        if not turn.is_backward:
            sent = [(dst, Message(o.name, m)) for o in spec.made for dst in self.reading_devices(o.name, m)]
            return sorted(sent, key=lambda row: self.place[self.first_reader(row[1], row[0])])
        gone = self.sent_gradients(spec, m)
        back = [(self.device_at(self.maker[i.name], m), Message(i.name, m, is_gradient=True)) for i in gone]
        return sorted(back, key=lambda row: -self.place[self.maker[row[1].value]])

    def sources(self, turn: Turn) -> list[tuple[Turn, TensorSpec]]:
        """The turns of other stages that make what a turn reads, each with the value."""
        spec, m = self.interface.stages[turn.stage], turn.micro_batch
        if turn.is_backward:
            return [(Turn(reader, m, True), out) for out in spec.made for reader in self.learners[out.name]]
        return [(Turn(self.maker[i.name], m), i) for i in spec.inputs if i.name in self.maker]

    def sent_gradients(self, spec: StageSpec, micro_batch: int) -> list[TensorSpec]:
        """Inputs of `spec` whose whole gradient on its device leaves for the producer after its backward."""
        device = self.device_at(spec.name, micro_batch)
        return [
            i
            for i in spec.inputs
            if (i.requires_grad or i.name in dict(spec.handed))
            and i.name in self.maker
            and self.device_at(self.maker[i.name], micro_batch) != device
            and self.gradient_stage(i.name, device, micro_batch) == spec.name
        ]
