"""Expected seconds of turns, and the order in which the turns of all devices are expected to end."""

from __future__ import annotations

from collections import deque

from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec, TensorSpec
from ..stage_time import MessageTimes, stage_seconds
from .flow import Flow, Placed, Turn


class Durations:
    """Expected seconds of turns and of the way of a value between devices."""

    def __init__(self, flow: Flow, hardware: Hardware, precision: str):
        self.flow, self.hardware = flow, hardware
        self.messages = MessageTimes(hardware)
        self.took_s = {spec.name: self.seconds(spec, precision) for spec in flow.specs}

    def seconds(self, spec: StageSpec, precision: str) -> tuple[float, float]:
        """Of a forward and a backward."""
        device = self.hardware.devices[self.flow.device_of[spec.name]]
        took = stage_seconds(spec, device, precision, spec.name in self.flow.trained)
        return took.forward_s, took.backward_s

    def moving_s(self, src: int, dst: int, value: TensorSpec) -> float:
        return self.messages.seconds(src, dst, value.bytes)


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
