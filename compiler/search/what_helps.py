"""Changes of the machine that would help: the same model planned again with more of one thing.

Each machine gets the chosen pipeline, and the same pipeline with partition-balanced in a few sizes and another mapping:
a quick look that takes seconds. An even better plan may exist, so a gain is a lower bound. Where these gain on the
machine at hand, too, as where somebody chose the pipeline, the first row says so: that much is no gain of more of
anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ...ir.errors import PassError, PenstockError
from ...ir.machine.hardware import Device, Hardware
from ...ir.machine.host import Host
from ...ir.machine.part import MachinePart
from ...passes.mapping.mapping import Mapping
from ...passes.partition.partition import Partition
from ...passes.schedule.schedule import Schedule
from ..plan import Plan
from ..profile.profile import for_machines_like
from .attempts import Attempts, Trace, Wishes
from .candidate import PLAIN, Candidate
from .candidates import balanced_partition, device_orders, lane_scouts, mappings, micro_batch_counts, stage_counts
from .trial import why_not

Part = TypeVar("Part", bound=MachinePart)
FASTER = 2.0
COMPUTATION = "computation"
SAME = "this machine, otherwise planned"
LEAST_GAIN = 0.01  # of a step, by which other plans for the machine at hand are told
MORE_DRAM_BYTES = 64 * 10**9
HELP_S = 25.0  # of computation for all machines together; each gets its share, and one candidate in any case


@dataclass(frozen=True)
class Change:
    """A `machine` with more of one thing; None where there cannot be more. `faster`: the part that works faster, if
    that is all that changes."""

    text: str
    machine: Hardware | None
    faster: str = ""


@dataclass(frozen=True)
class Help:
    """`step_s` on the changed machine, the plan's own where nothing better was found; None where `reason` says why."""

    change: str
    step_s: float | None
    reason: str = ""


def what_helps(trace: Trace, hardware: Hardware, wishes: Wishes, plan: Plan) -> list[Help]:
    """Plan again for each changed machine. Takes `HELP_S` of work, or as much as a candidate for each takes."""
    changes = [Change(SAME, hardware), *changed_machines(hardware)]
    if wishes.options.profiler is not None:  # measured times do not change with the hardware's rates
        changes = [change for change in changes if change.faster != COMPUTATION]
        options = dataclasses.replace(wishes.options, profiler=for_machines_like(wishes.options.profiler, hardware))
        wishes = dataclasses.replace(wishes, options=options)
    left_s, found = HELP_S, []
    for i, change in enumerate(changes):
        if change.machine is None:
            found.append(Help(change.text, None, "there is no such change to this machine"))
            continue
        share_s = left_s / (len(changes) - i)
        chosen = dataclasses.replace(wishes, decided=None, dump=None, search_s=share_s)
        attempts = Attempts(trace, change.machine, chosen)
        found.append(_help_of(change.text, attempts, plan))
        left_s -= attempts.work.seconds
    assert plan.predicted is not None
    same_s = found[0].step_s
    gains = same_s is not None and same_s <= (1 - LEAST_GAIN) * plan.predicted.step_s
    return found if gains else found[1:]


def _help_of(change: str, attempts: Attempts, plan: Plan) -> Help:
    assert plan.predicted is not None
    mesh, machine, wishes = plan.decisions.mesh, attempts.hardware, attempts.wishes
    more_devices = machine.num_devices > (mesh.num_devices if mesh else len(plan.predicted.arena_bytes))
    nearest = micro_batch_counts(wishes.batch_size, machine)[0][:1] if more_devices and not wishes.micro_batches else []
    try:
        for count in dict.fromkeys((plan.micro_batches, *nearest)):
            attempts.look(count, relatives(plan, attempts, count))
        step_s = attempts.result().best.step_s
    except PenstockError as error:
        return Help(change, None, why_not(error))
    return Help(change, min(step_s, plan.predicted.step_s))  # the old plan runs there, too, if need be on fewer devices


def relatives(plan: Plan, attempts: Attempts, count: int) -> Iterator[Candidate]:
    """The chosen pipeline, then pipelines like it with other partitions, mappings and numbers of stages; none like an
    asynchronous one, as another schedule would train otherwise."""
    chosen = Candidate.parse(plan.passes, attempts.hardware.num_devices)
    yield chosen
    if not chosen.is_synchronous:
        return
    mesh = chosen.mesh
    if mesh is not None and not mesh.shards and plan.decisions.mesh is not None:
        mesh = dataclasses.replace(mesh, shards=plan.decisions.mesh.shards)
    base = PLAIN.with_graph_passes(*chosen.graph_passes).ending(*dataclasses.replace(chosen.tiering, swap=False).passes)
    base = base if mesh is None else base.on(mesh)
    usual = base.with_(*(type(p)() for p in chosen.passes if isinstance(p, Partition | Mapping | Schedule)))
    yield usual
    try:
        lane = attempts.compiler(count).lane(base)
    except PassError:  # the micro-batches do not divide among this machine's lanes
        return
    if mesh is not None:
        yield from lane_scouts(lane, base, mesh)
    counts = stage_counts(lane, base.moves_activations)
    for stages, order in itertools.product(counts, device_orders(lane.lane_hardware)[:2]):
        yield usual.with_(balanced_partition(stages, base, lane.lane_hardware, order))
    for mapping in mappings(lane.lane_hardware) if lane.lane_hardware.num_devices > 1 else ():
        yield usual.with_(mapping)


def changed_machines(hardware: Hardware) -> Iterator[Change]:
    """The machine with more of each thing in turn."""
    if len(hardware.hosts) > 1:
        yield Change("twice the hosts", _twice_the_hosts(hardware))
        assert hardware.network is not None
        yield _speed_up("network", _with(hardware, network=_scale(hardware.network, "bandwidth")))
    elif not hardware.hosts[0].shared_memory:  # there, another device would have no memory
        one_more = "one more GPU" if hardware.devices[-1].kind == "cuda" else "one more device"
        yield Change(one_more, _one_more_device(hardware))
    yield Change("one more root complex", _one_more_root_complex(hardware))
    more = [host.model_copy(update={"dram_bytes": host.dram_bytes + MORE_DRAM_BYTES}) for host in hardware.hosts]
    yield Change("64 GB more DRAM", _with(hardware, hosts=more))
    if any(host.ssds for host in hardware.hosts):
        yield Change("one more SSD", _one_more_ssd(hardware))
        yield _speed_up("SSDs", _with(hardware, hosts=[_faster_disks(host) for host in hardware.hosts]))
    yield _speed_up("links to DRAM", faster_links(hardware))
    yield _speed_up(COMPUTATION, _with(hardware, devices=[_faster(d) for d in hardware.devices]))
    rates = [h.model_copy(update={"optimizer_params_per_s": h.optimizer_params_per_s * FASTER}) for h in hardware.hosts]
    yield _speed_up("optimizer on the host", _with(hardware, hosts=rates))


def _speed_up(what: str, machine: Hardware) -> Change:
    return Change(f"{what} {FASTER:g}x as fast", machine, faster=what)


def faster_links(hardware: Hardware) -> Hardware:
    rates = ("bandwidth_up", "bandwidth_down", "bandwidth_both")
    hosts = [
        host.model_copy(update={"root_complexes": [_scale(r, *rates) for r in host.root_complexes]})
        for host in hardware.hosts
    ]
    devices = [_scale(device, "h2d_bandwidth", "d2h_bandwidth") for device in hardware.devices]
    return _with(hardware, hosts=hosts, devices=devices)


def _one_more_device(hardware: Hardware) -> Hardware:
    """One more device like the last, under the root complex of its host with the fewest devices."""
    like = hardware.devices[-1]
    names = {device.name for device in hardware.devices}
    stem = like.name.rstrip("0123456789")
    name = next(name for i in range(len(names) + 1) if (name := f"{stem}{i}") not in names)
    homes = [device.root_complex for device in hardware.devices if device.host == like.host]
    emptiest = min(range(len(hardware.hosts[like.host].root_complexes)), key=homes.count)
    more = like.model_copy(update={"name": name, "root_complex": emptiest})
    return _with(hardware, devices=[*hardware.devices, more])


def _twice_the_hosts(hardware: Hardware) -> Hardware:
    """All hosts once more, with their devices."""
    count, names = len(hardware.hosts), {device.name for device in hardware.devices}
    devices = []
    for number, device in enumerate(hardware.devices):
        name = f"{device.name.rstrip('0123456789')}{hardware.num_devices + number}"
        name = name if name not in names else f"{device.name}_again"
        devices.append(device.model_copy(update={"name": name, "host": device.host + count}))
    return _with(hardware, hosts=[*hardware.hosts, *hardware.hosts], devices=[*hardware.devices, *devices])


def _one_more_ssd(hardware: Hardware) -> Hardware:
    """One more SSD like the last in every host that has one."""
    more = [
        [*host.ssds, host.ssds[-1].model_copy(update={"directory": None})] if host.ssds else []
        for host in hardware.hosts
    ]
    return _with(hardware, hosts=[h.model_copy(update={"ssds": ssds}) for h, ssds in zip(hardware.hosts, more)])


def _faster_disks(host: Host) -> Host:
    uplink = host.ssd_uplink_bandwidth
    faster = {"ssds": [_scale(ssd, "read_bandwidth", "write_bandwidth") for ssd in host.ssds]}
    return host.model_copy(update=faster | {"ssd_uplink_bandwidth": None if uplink is None else FASTER * uplink})


def _one_more_root_complex(hardware: Hardware) -> Hardware | None:
    """One more on the host with the most devices a complex, its devices spread evenly; None where each has its own."""
    sizes = [sum(device.host == i for device in hardware.devices) for i in range(len(hardware.hosts))]
    shares = [size / len(host.root_complexes) for size, host in zip(sizes, hardware.hosts)]
    at = shares.index(max(shares))
    if shares[at] <= 1:
        return None
    host = hardware.hosts[at]
    count = len(host.root_complexes) + 1
    hosts = list(hardware.hosts)
    hosts[at] = host.model_copy(update={"root_complexes": [*host.root_complexes, host.root_complexes[-1]]})
    return _with(hardware, hosts=hosts, devices=_spread(hardware.devices, at, sizes[at], count))


def _spread(devices: list[Device], at: int, size: int, count: int) -> list[Device]:
    """The devices of a host spread over `count` root complexes, so that neighbours stay together."""
    place = iter(range(size))
    return [
        device.model_copy(update={"root_complex": next(place) * count // size}) if device.host == at else device
        for device in devices
    ]


def _faster(device: Device) -> Device:
    peak = {dtype: rate * FASTER for dtype, rate in device.peak_flops.items()}
    table = device.rates.scaled(FASTER) if device.rates is not None else None
    return _scale(device, "memory_bandwidth").model_copy(
        update={"peak_flops": peak, "rates": table, "op_overhead_s": device.op_overhead_s / FASTER}
    )


def _scale(part: Part, *names: str) -> Part:
    rates = {name: getattr(part, name) for name in names}
    return part.model_copy(update={name: rate * FASTER for name, rate in rates.items() if rate is not None})


def _with(hardware: Hardware, **changes: Any) -> Hardware:
    """A new document, since a `Hardware` caches its links, which must not come along."""
    fields = {name: getattr(hardware, name) for name in type(hardware).model_fields}
    return Hardware.model_validate({**fields, **changes})
