"""What turns read and write: which stage makes a value, which stages need it, and the messages between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

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

    def __init__(self, interface: Interface, devices: list[int], turns: Mapping[int, list[Turn]] | None = None):
        self.interface = interface
        self.specs: list[StageSpec] = list(interface.stages.values())
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
        everyone = range(interface.num_devices)
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
        todo = range(self.interface.micro_batches)
        back = [name for name in reversed(mine) if name in self.trained]
        return [Turn(name, m) for name in mine for m in todo] + [Turn(name, m, True) for name in back for m in todo]

    def sends(self, device: int) -> list[tuple[int, Message]]:
        """(destination, message) of all that a device sends, in issue order."""
        return [row for turn in self.turns[device] for row in self.sent_by(turn)]

    def sent_by(self, turn: Turn) -> list[tuple[int, Message]]:
        """(destination, message) of what leaves the device behind one turn: what is read first leaves first."""
        spec, m = self.interface.stages[turn.stage], turn.micro_batch
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
        spec, m = self.interface.stages[turn.stage], turn.micro_batch
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
