"""Expected seconds of turns and of the way of a value between devices."""

from __future__ import annotations

from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec, TensorSpec
from ..stage_time import MessageTimes, stage_seconds
from .flow import Flow


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
