"""Lower bounds of a step, before any program exists: what no schedule of these stages on these devices can beat.

- A device: the forwards that must come before its first stage, all it computes itself, and the backwards that must
  come after.
- A link: the weights that cannot stay on their devices come once for the forward and, but for one stage a device, once
  more for the backward; their gradients leave (Mobius eq. 1); what stages send each other is added.
- The host's optimizer: all parameters of stages that are stepped in DRAM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..passes.base import Draft
from ..runtime.hardware import Device
from ..runtime.program import StageSpec


@dataclass(frozen=True)
class Bound:
    """Seconds that no schedule undercuts, and what forces them ("gpu0 compute", "rc0.0.down")."""

    seconds: float
    by: str


def lower_bound(draft: Draft, swap: bool = False) -> Bound:
    """For stages that are each run on one device. `swap`: weights come from DRAM in any case."""
    specs = [stage.spec for stage in draft.stages]
    loads = [*_compute(draft, specs), *_traffic(draft, specs, swap)]
    return max(loads, key=lambda bound: bound.seconds, default=Bound(0.0, "nothing"))


def stage_seconds(spec: StageSpec, device: Device, precision: str) -> tuple[float, float]:
    """Forward and backward of one micro-batch, saved tensors kept; as the simulator counts, without its overheads."""
    for name, forward_s, _, backward_s in spec.seconds:
        if name == device.name:
            return forward_s, backward_s
    return (
        device.compute_s(spec.forward_flops, spec.forward_traffic_bytes, precision, spec.launches),
        device.compute_s(spec.backward_flops, spec.backward_traffic_bytes, precision, 2 * spec.launches),
    )


def _compute(draft: Draft, specs: Sequence[StageSpec]) -> list[Bound]:
    devices, precision = draft.hardware.devices, draft.options.precision
    maker = {out.name: i for i, spec in enumerate(specs) for out in spec.outputs}
    before: list[float] = []  # seconds that pass before a stage's first forward can begin
    after: list[float] = []  # and after its last backward, until the step can end
    both = [stage_seconds(spec, devices[d], precision) for spec, d in zip(specs, draft.devices)]
    trained = _trained(specs, maker)
    busy_s: dict[int, float] = defaultdict(float)
    for i, spec in enumerate(specs):
        read = {maker[value.name] for value in spec.inputs if value.name in maker}
        before.append(max((before[j] + both[j][0] for j in read), default=0.0))
        learns = {maker[v.name] for v in spec.inputs if v.name in maker and v.requires_grad}
        after.append(max((after[j] + both[j][1] for j in learns if trained[j]), default=0.0) if trained[i] else 0.0)
        busy_s[draft.devices[i]] += draft.options.micro_batches * (both[i][0] + both[i][1] * trained[i])
    found = []
    for d, own_s in busy_s.items():
        mine = [i for i, at in enumerate(draft.devices) if at == d]
        waits_s = min(before[i] for i in mine) + min(after[i] for i in mine)
        found.append(Bound(waits_s + own_s, f"{devices[d].name} compute"))
    return found


def _trained(specs: Sequence[StageSpec], maker: dict[str, int]) -> list[bool]:
    return [bool(s.trained_params or any(v.requires_grad and v.name in maker for v in s.inputs)) for s in specs]


def _traffic(draft: Draft, specs: Sequence[StageSpec], swap: bool) -> list[Bound]:
    hardware = draft.hardware
    moved: dict[str, float] = defaultdict(float)  # link to bytes
    params: dict[int, int] = defaultdict(int)  # host to parameters stepped there

    def move(source: str, target: str, amount: float) -> None:
        for link in hardware.path(source, target) if amount else ():
            moved[link] += amount

    for d, device in enumerate(hardware.devices):
        mine = [spec for spec, at in zip(specs, draft.devices) if at == d]
        if mine and (swap or _lasting_bytes(draft, mine) > device.budget_bytes):
            again = [spec.weight_bytes for spec in mine if spec.rematerialisable and not swap]
            twice = sum(again) - max(again, default=0)
            move(f"dram{device.host}", device.name, sum(spec.weight_bytes for spec in mine) + twice)
            move(device.name, f"dram{device.host}", sum(spec.grad_bytes for spec in mine))
            params[device.host] += sum(spec.trained_params for spec in mine)
    for value_bytes, source, target in _messages(specs, draft.devices):
        move(hardware.devices[source].name, hardware.devices[target].name, value_bytes * draft.options.micro_batches)
    rates = {name: link.bandwidth for name, link in hardware.links().items()}
    found = [Bound(amount / rates[link], link) for link, amount in moved.items()]
    for host, count in params.items():
        found.append(Bound(count / hardware.hosts[host].optimizer_params_per_s, f"optimizer of host {host}"))
    return found


def _lasting_bytes(draft: Draft, specs: Sequence[StageSpec]) -> int:
    """What a device holds at the end of a step if nothing is swapped."""
    each = draft.options.state_bytes_per_param + (4 if draft.options.precision in ("bf16", "fp16") else 0)
    return int(sum(s.weight_bytes + s.grad_bytes + each * s.trained_params for s in specs))


def _messages(specs: Sequence[StageSpec], devices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(bytes, source, target) of the values of one micro-batch that travel, once a device; gradients come back."""
    at = {out.name: device for spec, device in zip(specs, devices) for out in spec.outputs}
    found: dict[tuple[str, int], tuple[int, int, int]] = {}
    for spec, device in zip(specs, devices):
        for value in spec.inputs:
            source = at.get(value.name, device)
            if source != device:
                found[value.name, device] = (value.bytes, source, device)
                if value.requires_grad:
                    found[f"d_{value.name}", device] = (value.bytes, device, source)
    return list(found.values())


def machine_bound(draft: Draft) -> Bound:
    """What no plan for this machine and number of micro-batches undercuts: the computation of all blocks, split over
    all devices without a rest, or one micro-batch through all of them on the fastest."""
    devices, precision, count = draft.hardware.devices, draft.options.precision, draft.options.micro_batches
    per_device = [
        sum(sum(stage_seconds(stage.spec, device, precision)) for stage in draft.stages) for device in devices
    ]
    if not all(per_device):
        return Bound(0.0, "nothing")
    shared_s = count / sum(1.0 / seconds for seconds in per_device)
    return max(
        Bound(shared_s, "computation shared by all devices"),
        Bound(min(per_device), "one micro-batch through all stages"),
        key=lambda bound: bound.seconds,
    )
