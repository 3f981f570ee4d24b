"""Expected seconds of turns and of the way of a value between devices."""

from __future__ import annotations

from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec, TensorSpec
from .flow import Flow


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
