"""Expected seconds of one micro-batch's computation on a device, and of a message between two devices.

Every pass, and every bound of the search, builds on these. The simulator asks the device as well (`Device.compute_s`),
but for whole ops, and adds the time that the runtime needs around each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ...ir.machine.call_mix import CallMix
from ...ir.machine.hardware import Device, Hardware
from ...ir.program import StageSpec
from ..turn_seconds import TurnSeconds

if TYPE_CHECKING:
    from ..blocks import Block


class _AgainCosts(Protocol):
    """The costs of a forward that runs again, as the roofline reads them."""

    @property
    def flops(self) -> float: ...
    @property
    def traffic_bytes(self) -> float: ...
    @property
    def launches(self) -> int: ...
    @property
    def mix(self) -> CallMix: ...


class _Costs(Protocol):
    """The costs of a block or a stage that the roofline reads."""

    @property
    def forward_flops(self) -> float: ...
    @property
    def backward_flops(self) -> float: ...
    @property
    def forward_traffic_bytes(self) -> float: ...
    @property
    def backward_traffic_bytes(self) -> float: ...
    @property
    def launches(self) -> int: ...
    @property
    def forward_mix(self) -> CallMix: ...
    @property
    def backward_mix(self) -> CallMix: ...
    @property
    def again(self) -> _AgainCosts | None: ...


def roofline(costs: _Costs, device: Device, precision: str) -> TurnSeconds:
    """Seconds of arithmetic, memory traffic and calls, each by its size; backward has twice the calls of forward."""
    forward_s = device.compute_s(
        costs.forward_flops, costs.forward_traffic_bytes, precision, costs.launches, costs.forward_mix
    )
    backward_s = device.compute_s(
        costs.backward_flops, costs.backward_traffic_bytes, precision, 2 * costs.launches, costs.backward_mix
    )
    again = costs.again
    again_s = forward_s
    if again is not None:
        again_s = device.compute_s(again.flops, again.traffic_bytes, precision, again.launches, again.mix)
    return TurnSeconds(forward_s, again_s, backward_s)


def block_seconds(block: Block, device: Device, precision: str) -> TurnSeconds:
    """The block's measured seconds, else those by the roofline."""
    return block.seconds.get(device.name) or roofline(block.cost, device, precision)


def stage_seconds(spec: StageSpec, device: Device, precision: str, has_backward: bool = True) -> TurnSeconds:
    """The stage's measured seconds, else those by the roofline, where a missing backward takes no time."""
    measured = next((row for name, *row in spec.seconds if name == device.name), None)
    if measured is not None:
        return TurnSeconds(*measured)
    found = roofline(spec, device, precision)
    return found if has_backward else replace(found, backward_s=0.0)


class MessageTimes:
    """Seconds of messages between devices of a machine, by their indices, with the whole path to themselves."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.names = [device.name for device in hardware.devices]
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def way(self, src: int, dst: int) -> tuple[float, float]:
        """Seconds of an empty message, and bytes/s; 0 and infinity from a device to itself."""
        if (src, dst) not in self._known:
            a, b = self.names[src], self.names[dst]
            self._known[src, dst] = self.hardware.latency_s(a, b), self.hardware.bandwidth(a, b)
        return self._known[src, dst]

    def seconds(self, src: int, dst: int, num_bytes: float, count: int = 1) -> float:
        """Seconds of `num_bytes` in `count` messages."""
        latency_s, bandwidth = self.way(src, dst)
        return count * latency_s + num_bytes / bandwidth
