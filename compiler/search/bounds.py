"""Lower bounds of a step, before any program exists: seconds that no schedule of these stages on these devices beats.

They hold for a step from rest, and for one among many, from the end of the step before to its own: candidates are
compared by the latter.

- A device: all it computes itself; and what it waits for from its last backward to its first forward of the next step,
  while the first trained stage has its backward and its update, and then its forward.
- A link: weights that cannot stay on their devices come once for the forward and, but for one stage a device, once
  more for the backward; their gradients leave (Mobius eq. 1). Messages between stages are added.
- A host's optimizer: all parameters of stages that are stepped in DRAM.
- A host's SSDs: weights and states that DRAM cannot hold are read at least once a step, and written if trained.
- A host's network: the part of gathered weights and summed gradients that is on other hosts (MiCS 2.3).
- What members of teams exchange inside layers, of each micro-batch, and its gradients; once a step, gradients of what
  members with different tokens all hold.

Where lanes share a machine, a lane has its part of it; lanes that share stages each move a piece of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...graph.costs.stage_time import stage_seconds
from ...ir import ops
from ...ir.machine.hardware import Device, Hardware
from ...ir.program import Exchange, Interface, ParamSpec, StageSpec, TensorSpec, are_alike
from ...passes.draft import Draft
from ...passes.mapping.mapping import equal_devices
from ...passes.staying import choose_staying, mark_staying
from ...runtime.simulate.collectives import rounds_of
from .teams import has_experts, has_long_rows

SUMS = (2, "")  # how members add up gradients: rounds, pattern


@dataclass(frozen=True)
class Bound:
    """Seconds that no schedule undercuts, and what forces them ("gpu0 compute", "rc0.0.down")."""

    seconds: float
    by: str


def lower_bound(
    draft: Draft, swap: bool = False, tier: str | None = None, split: bool = False, synchronous: bool = True,
    staying: bool = True, resident: bool = False,
) -> Bound:  # fmt: skip
    """The bound for stages that are each run on one device. `swap`: weights come from DRAM in any case; `tier`: what
    SSDs hold ("auto": what DRAM cannot hold, "states", "all"); None: nothing. `split`: one half of each backward may
    come after all that waits for the other half. `synchronous`: a stage's forward waits for the update before it.
    `staying`: what is trained of mostly frozen stages stays on the device; `resident`: any stages may."""
    specs = mark_staying(draft, choose_staying(draft) if staying else [])
    loads = _compute(draft, specs, split, synchronous)
    lanes = draft.mesh.lanes
    alike = not lanes or are_alike(draft.machine, lanes)  # else other lanes may have other parts than the first
    if alike and not draft.copies:  # whose devices send some of the messages each
        loads += _traffic(draft, specs, swap, tier, resident)
    loads += [*_network_bounds(draft, specs), *_ring_bounds(draft, specs), *_team_bounds(draft, specs)]
    return max(loads, key=lambda bound: bound.seconds, default=Bound(0.0, "nothing"))


def _compute(draft: Draft, specs: Sequence[StageSpec], split: bool, synchronous: bool) -> list[Bound]:
    devices, precision = draft.lane_hardware.devices, draft.options.precision
    maker = {out.name: i for i, spec in enumerate(specs) for out in spec.outputs}
    took = [stage_seconds(spec, devices[d], precision) for spec, d in zip(specs, draft.devices)]
    trained = _have_backward(specs)
    first = next((i for i, spec in enumerate(specs) if spec.trained_params), 0)
    before: dict[int, float] = {first: 0.0}  # seconds from the begin of the first trained stage to that of a later one
    after: dict[int, float] = {first: 0.0}  # and from the end of a later stage's backward to the end of the first one's
    busy_s: dict[int, float] = defaultdict(float)
    for i, spec in enumerate(specs):
        read = [(maker[value.name], value.requires_grad) for value in spec.inputs if maker.get(value.name) in before]
        if read:
            before[i] = max(before[j] + took[j].forward_s for j, _ in read)
            after[i] = max((after[j] + took[j].backward_s for j, learns in read if learns), default=0.0)
        own = -(-draft.options.micro_batches // len(draft.copies.get(spec.name, [0])))  # those of the first device
        busy_s[draft.devices[i]] += own * (took[i].forward_s + took[i].backward_s * trained[i])
    found = []
    for d, own_s in busy_s.items():
        mine = [i for i, at in enumerate(draft.devices) if at == d]
        waits_s = min(before.get(i, 0.0) for i in mine) if synchronous else 0.0
        waits_s += min(after.get(i, 0.0) for i in mine) if synchronous and not split else 0.0
        found.append(Bound(waits_s + own_s, f"{devices[d].name} compute"))
    return found


def _have_backward(specs: Sequence[StageSpec]) -> list[bool]:
    """Whether each stage has a backward."""
    made = {out.name for spec in specs for out in spec.outputs}
    return [bool(s.trained_params or any(v.requires_grad and v.name in made for v in s.inputs)) for s in specs]


def _traffic(
    draft: Draft, specs: Sequence[StageSpec], swap: bool, tier: str | None, resident: bool
) -> list[Bound]:
    hardware, shards = draft.lane_hardware, draft.mesh.shards
    moved: dict[str, float] = defaultdict(float)  # link -> bytes
    swapped: dict[int, list[StageSpec]] = defaultdict(list)  # host -> stages in its DRAM
    updated: dict[int, float] = defaultdict(float)  # host -> parameters
    room: dict[int, int] = defaultdict(int)  # host -> bytes that resident stages may take on its devices

    def move(source: str, target: str, amount: float) -> None:
        for link in hardware.path(source, target) if amount else ():
            moved[link] += amount

    for d, device in enumerate(hardware.devices):
        mine = [spec for spec, at in zip(specs, draft.devices) if at == d]
        if mine and (swap or _lasting_bytes(draft, mine) > device.budget_bytes):
            own_room = device.budget_bytes if resident else 0
            taken = [_lasting_bytes(draft, [spec]) for spec in mine]
            again = [spec.weight_bytes if spec.rematerialisable and not swap else 0 for spec in mine]
            weights = [spec.weight_bytes + twice for spec, twice in zip(mine, again)]
            down = _least_sum(weights, taken, own_room) - max(again)
            grads = [0 if spec.staying else spec.grad_bytes for spec in mine]
            move(f"dram{device.host}", device.name, max(0.0, down) / shards)
            move(device.name, f"dram{device.host}", _least_sum(grads, taken, own_room) / shards)
            params = [0 if spec.staying else spec.trained_params for spec in mine]
            updated[device.host] += _least_sum(params, taken, own_room) / shards
            room[device.host] += own_room
            swapped[device.host] += mine
    for value_bytes, source, target in _messages(specs, draft.devices):
        move(hardware.devices[source].name, hardware.devices[target].name, value_bytes * draft.options.micro_batches)
    rates = {name: link.bandwidth for name, link in hardware.links().items()}
    found = [Bound(amount / rates[link], link) for link, amount in moved.items()]
    for host, own in swapped.items():
        rate = hardware.hosts[host].optimizer_params_per_s
        found.append(Bound(updated[host] / rate, f"optimizer of host {host}"))
        if tier is not None and hardware.hosts[host].ssds:
            found.append(_disks(draft, own, host, tier, room[host]))
    return found


def _least_sum(amounts: Sequence[float], taken: Sequence[int], room_bytes: int) -> float:
    """The least sum of the stages' amounts but for those of stages that stay within the room: of each stage some share
    may, those with the largest amount for a byte first."""
    left, total = float(room_bytes), 0.0
    for amount, num_bytes in sorted(zip(amounts, taken), key=lambda each: -each[0] / max(1, each[1])):
        share = min(1.0, left / num_bytes) if num_bytes else 1.0
        left -= share * num_bytes
        total += (1 - share) * amount
    return total


def _disks(draft: Draft, specs: Sequence[StageSpec], host: int, tier: str, room_bytes: int) -> Bound:
    """The bound of a host's SSDs, whose reads and writes take turns; `room_bytes` of the stages stay on devices."""
    lasts = [draft.options.lasting(spec.weight_bytes, () if spec.staying else spec.params) for spec in specs]
    kept = [spec for spec in specs if spec.staying or not spec.trained_params]
    frozen = sum(spec.weight_bytes for spec in kept) // draft.mesh.shards
    whole = sum(map(sum, lasts)) // draft.mesh.shards
    states = whole - sum(spec.weight_bytes for spec in specs) // draft.mesh.shards
    beyond = whole - draft.lane_hardware.dram_budget_bytes(host)
    stored = max(0, {"auto": beyond, "states": states, "all": whole}[tier] - room_bytes)
    written = stored if tier == "states" else max(0, stored - frozen)
    return Bound(_disk_seconds(draft.lane_hardware, [host], stored, written), f"ssd{host}")


def _disk_seconds(hardware: Hardware, hosts: Sequence[int], read_bytes: float, written_bytes: float) -> float:
    links = hardware.links()
    read, write = (sum(links[f"ssd{host}.{way}"].bandwidth for host in hosts) for way in ("read", "write"))
    return read_bytes / read + written_bytes / write


def _lasting_bytes(draft: Draft, specs: Sequence[StageSpec]) -> int:
    """The bytes that a device holds at the end of a step if nothing is swapped."""
    weights = sum(spec.weight_bytes + spec.staying_bytes for spec in specs)
    updates = sum(spec.grad_bytes + draft.options.optimizer_bytes(spec.params) for spec in specs)
    return int((weights + updates) / draft.mesh.shards)


def _network_bounds(draft: Draft, specs: Sequence[StageSpec]) -> list[Bound]:
    """The bounds of collectives over lanes between hosts: they send shards of weights at least once, and gradients."""
    network, lanes, shards = draft.machine.network, draft.mesh.lanes, draft.mesh.shards
    if network is None or not lanes:
        return []
    host_of = [device.host for device in draft.machine.devices]
    sent: dict[int, float] = defaultdict(float)  # host to bytes
    for role in range(len(lanes[0])):
        mine = [spec for spec, at in zip(specs, draft.devices) if at == role]
        weights, grads = sum(s.weight_bytes for s in mine), sum(s.grad_bytes for s in mine)
        column = [host_of[lane[role]] for lane in lanes]
        groups: list[tuple[list[int], float]]
        groups = [(column[i : i + shards], weights + grads) for i in range(0, len(lanes), shards)]
        groups += [(column[i::shards], 2 * grads / shards) for i in range(shards)]
        for hosts, num_bytes in groups:
            distinct = set(hosts)
            for host in distinct if len(distinct) > 1 else ():
                sent[host] += (len(distinct) - 1) / len(distinct) * num_bytes
    return [Bound(num_bytes / network.bandwidth, f"nic{host}.up") for host, num_bytes in sent.items()]


def _ring_bounds(draft: Draft, specs: Sequence[StageSpec]) -> list[Bound]:
    """The bounds of rings of devices that share stages, where a ring is on one host; of the first such host."""
    hardware, lanes, shards = draft.machine, draft.mesh.lanes, draft.mesh.shards
    moved: dict[str, float] = defaultdict(float)  # link to bytes
    first: int | None = None
    for role in range(len(lanes[0])) if shards > 1 else ():
        mine = [spec for spec, at in zip(specs, draft.devices) if at == role]
        each = (shards - 1) / shards * sum(spec.weight_bytes + spec.grad_bytes for spec in mine)
        for begin in range(0, len(lanes), shards):
            ring = sorted(lane[role] for lane in lanes[begin : begin + shards])
            hosts = {hardware.devices[member].host for member in ring}
            if len(hosts) > 1 or (first is not None and hosts != {first}):
                continue
            first = next(iter(hosts))
            for i, member in enumerate(ring):
                for link in hardware.path(hardware.devices[ring[i - 1]].name, hardware.devices[member].name):
                    moved[link] += each
    rates = hardware.links()
    return [Bound(amount / rates[link].bandwidth, link) for link, amount in moved.items()]


def _team_bounds(draft: Draft, specs: Sequence[StageSpec]) -> list[Bound]:
    """The bounds of links over which members of teams exchange values and gradients; of the hosts of the first team."""
    lanes, team, hardware = draft.mesh.lanes, draft.mesh.team, draft.machine
    if team == 1 or not any(spec.exchanges for spec in specs):
        return []
    context = ops.Context(Interface({}, {}, lanes=tuple(map(tuple, lanes)), team=team), 0)
    counts = draft.mesh.micro_batches or [draft.options.micro_batches] * len(lanes)
    sums_in_team = draft.graph.divided and draft.graph.apart
    known = {t.name: t for spec in specs for t in (*spec.outputs, *(e.result for e in spec.exchanges))}
    moved: dict[str, float] = defaultdict(float)  # link to bytes
    first: set[int] = set()
    for role, begin in itertools.product(range(len(lanes[0])), range(0, len(lanes), team)):
        members = [lane[role] for lane in lanes[begin : begin + team]]
        hosts = {hardware.devices[member].host for member in members}
        first = first or hosts
        mine = [(s, trains) for s, trains, d in zip(specs, _have_backward(specs), draft.devices) if d == role]
        sent: dict[tuple[int, str], float] = defaultdict(float)  # how members meet -> bytes
        for spec, trains in mine if hosts == first else ():
            for made in (e for e in spec.exchanges if e.source in known):  # others are for evaluation alone
                for back in (False, True) if trains and made.result.requires_grad else (False,):
                    work = _exchange_work(context, made, back, known)
                    sent[work.rounds, work.pattern] += work.moved_bytes * counts[begin]
            if trains and sums_in_team:
                sent[SUMS] += spec.common_grad_bytes
        for (times, pattern), num_bytes in sent.items():
            for run in rounds_of(members, hardware, num_bytes, times, pattern=pattern) if num_bytes else ():
                for (source, target), amount in run.hops.items():
                    for link in hardware.path(hardware.devices[source].name, hardware.devices[target].name):
                        moved[link] += amount
    rates = hardware.links()
    return [Bound(amount / rates[link].bandwidth, link) for link, amount in moved.items()]


def _exchange_work(context: ops.Context, made: Exchange, back: bool, known: Mapping[str, TensorSpec]) -> ops.Work:
    """The work of an exchange, or of that of its result's gradient. `known`: what stages give and members exchange."""
    op, fields = (made.back, made.back_fields) if back else (made.op, made.fields)
    if not op:
        return ops.Work("")
    given = [made.result] if back else [known[made.source]]
    given += [known[made.routes]] if made.routes else []
    operands = [ops.Value("tensor", t.bytes, shape=t.shape, dtype=t.dtype) for t in given]
    work: ops.Work = ops.ALL[op].work(context, *operands, group=ops.TEAM, **dict(fields))
    return work


def _messages(specs: Sequence[StageSpec], devices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(bytes, source, target) of one micro-batch's messages: each device gets a value once; the gradient goes back."""
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


def device_seconds(hardware: Hardware, measured: bool, seconds: Callable[[Device], float]) -> list[float]:
    """Seconds per device; of equal devices one is asked, unless times are `measured`, which go by a device's name."""
    groups = [[d] for d in range(hardware.num_devices)] if measured else equal_devices(hardware)
    found = {d: took_s for members in groups for took_s in [seconds(hardware.devices[members[0]])] for d in members}
    return [found[d] for d in range(hardware.num_devices)]


def machine_bound(draft: Draft) -> Bound:
    """The bound of any plan for this machine and number of micro-batches, with the kernels that plans have: the
    computation of all blocks, divided among all devices without a rest; one micro-batch through all blocks on the
    fastest device, unless a team may share it; or the way from SSD and back of the bytes that devices and DRAM together
    cannot hold."""
    hardware = draft.machine
    per_device = _seconds_by_device(draft, lambda spec, device, trains: _eager_s(draft, spec, device, trains))
    if not all(per_device):
        return Bound(0.0, "nothing")
    may_share = hardware.num_devices > 1 and (has_long_rows(draft.graph) or has_experts(draft.graph))
    alone = draft.graph.team == 1 and not may_share
    bounds = [Bound(_shared_s(draft, per_device), "computation shared by all devices"), *machine_disks(draft)]
    bounds += [Bound(min(per_device), "one micro-batch through all stages")] if alone else []
    return max(bounds, key=lambda bound: bound.seconds)


def ideal_bounds(draft: Draft) -> tuple[float, Bound]:
    """The bounds of any step of the model on this machine, whatever its kernels and micro-batches: the seconds where
    all that only reads and writes is fused into products and attention, which run at the rates that kernels reach; and
    the bound at the peak of the devices' matrix units."""

    def ideal_s(at: int, spec: StageSpec, device: Device, trains: bool) -> float:
        mixes = [(spec.forward_flops, spec.forward_mix), (spec.backward_flops * trains, spec.backward_mix)]
        forward_s, backward_s = (device.arithmetic_s(n, draft.options.precision, mix)[at] for n, mix in mixes)
        least_s = forward_s + min(backward_s, 2 * forward_s)  # beyond that, backward computes forward again
        return min(least_s, _eager_s(draft, spec, device, trains))  # which may have been measured

    fused, peak = (_seconds_by_device(draft, functools.partial(ideal_s, at)) for at in (0, 1))
    others = [Bound(_update_s(draft), "updates"), *machine_disks(draft)]
    bounds = [Bound(_shared_s(draft, peak), "arithmetic at the devices' peak"), *others]
    least = max(bounds, key=lambda bound: bound.seconds)
    return max(_shared_s(draft, fused), least.seconds), least


def _seconds_by_device(draft: Draft, seconds: Callable[[StageSpec, Device, bool], float]) -> list[float]:
    """The seconds of one micro-batch through all stages, on each device."""
    specs = [stage.spec for stage in draft.stages]
    rows = list(zip(specs, _have_backward(specs)))
    measured = any(spec.seconds for spec in specs)
    return device_seconds(draft.machine, measured, lambda d: sum(seconds(spec, d, trains) for spec, trains in rows))


def _eager_s(draft: Draft, spec: StageSpec, device: Device, trains: bool) -> float:
    return stage_seconds(spec, device, draft.options.precision, trains).both_s


def _shared_s(draft: Draft, per_device: Sequence[float]) -> float:
    """Seconds of all micro-batches, divided among all devices without a rest."""
    count = draft.mesh.total_micro_batches(draft.options.micro_batches)
    parts = draft.graph.team if draft.graph.apart else 1  # of width, members have parts in common
    return count * parts / sum(1.0 / seconds for seconds in per_device) if all(per_device) else 0.0


def _update_s(draft: Draft) -> float:
    """Seconds of all updates, by devices and hosts together: a device reads a gradient and a weight, and writes it."""
    trained = [param for param in _distinct_params(draft) if param.requires_grad]
    num_bytes, num = sum(param.bytes for param in trained), sum(param.numel for param in trained)
    rate = sum(device.memory_bandwidth * num / (3 * num_bytes) for device in draft.machine.devices) if num else math.inf
    return num / (rate + sum(host.optimizer_params_per_s for host in draft.machine.hosts))


def _distinct_params(draft: Draft) -> list[ParamSpec]:
    """The parameters of all stages, tied ones once."""
    ties = draft.graph.ties()
    return list({ties.get(p.name, p.name): p for stage in draft.stages for p in stage.spec.params}.values())


def machine_disks(draft: Draft) -> list[Bound]:
    """The bound of SSDs: bytes that fit neither devices nor DRAM are read and, as far as they are trained, written."""
    hardware, params = draft.machine, _distinct_params(draft)
    hosts = [host for host in range(len(hardware.hosts)) if hardware.hosts[host].ssds]
    if not hosts:
        return []
    room = sum(device.budget_bytes for device in hardware.devices)
    room += sum(hardware.dram_budget_bytes(host) for host in range(len(hardware.hosts)))
    frozen = sum(param.bytes for param in params if not param.requires_grad)
    trained = sum(param.bytes for param in params if param.requires_grad)
    trained += draft.options.optimizer_bytes(params)
    stored = max(0.0, frozen + trained - room)
    return [Bound(_disk_seconds(hardware, hosts, stored, max(0, stored - frozen)), "SSDs")]
