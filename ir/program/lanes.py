"""Lanes: several copies of one computation, each on devices of its own and on its share of the micro-batches.

A plan for many devices is made, printed and verified for one lane: its programs name devices by their place in the
lane, count micro-batches in it, and speak of devices in other lanes as groups only (`SHARDS`, `REPLICAS`, `TEAM`).
Lanes are all alike, so a ring of waits over several lanes would be a ring in one: what is proven of one holds for all.
`bind` writes the programs out for every device of the machine; that is what runs. The lanes of a team run the same
micro-batches together, each a part of the work inside a layer. Lanes with fewer micro-batches than others leave out the
turns of those that they lack (`shares.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from .. import ops
from ..machine.hardware import Hardware
from ..machine.racks import racks_of_lane
from ..stages.interface import Interface
from .program import Program, infer_all
from .shares import first_micro_batches

if TYPE_CHECKING:
    pass

# Names of links that hold the number of a host or a rack, and of a root complex or a disk: rc0.1.up, nic0.down,
# rack0.up, ssd0.read.
NUMBERED = re.compile(r"(?P<kind>rc|nic|ssd|ssdbus|host|rack)(?P<host>\d+)(?:\.(?P<complex>\d+))?(?P<rest>\..+)")
WRITTEN_OUT = 16  # devices
COPIES = "copies"  # with a stage's name: the devices that run it in turn
WORLD = "world"  # all devices that have a part of one copy of the weights
GroupRow = tuple[int, str, str]


def bind(programs: Sequence[Program]) -> list[Program]:
    """One program for every device of the machine, in order, made from the programs of a lane: with the machine's
    devices, the batch's micro-batches, and groups that have members. Without lanes, the programs as they are."""
    interface = programs[0].interface
    if not interface.lanes:
        return list(programs)
    whole = bound_interface(interface)
    found = [bind_one(p, lane, whole) for lane in range(len(interface.lanes)) for p in programs]
    return sorted(found, key=lambda program: program.device)


def bind_one(program: Program, lane: int, whole: Interface | None = None) -> Program:
    """The program that lane number `lane` runs, made from the program of a lane. `whole`: see `bound_interface`."""
    interface, role = program.interface, program.device
    if not interface.lanes:
        return program
    devices = interface.lanes[lane]
    bound = first_micro_batches(program, interface.micro_batches_of(lane))
    bound.device, bound.interface = devices[role], whole or bound_interface(interface)
    for node in bound.ops():
        node.kwargs = {name: _bound(interface, lane, role, name, value) for name, value in node.kwargs.items()}
    infer_all(bound)
    return bound


def _bound(interface: Interface, lane: int, role: int, name: str, value: Any) -> Any:
    if value is None or isinstance(value, fx.Node):
        return value
    if name in ("dst", "src"):
        return interface.lanes[lane][value]
    if name == "micro_batch":
        return interface.first_micro_batch(lane) + value
    return group_name(interface, lane, role, value) if name == "group" else value


def group_name(interface: Interface, lane: int, role: int, group: str) -> str:
    """The name, among the groups of the whole machine, of a group in a lane's program."""
    if group == ops.TEAM:
        return f"{group}.{role}.{lane // interface.team}"
    if group == ops.SHARDS:
        return f"{group}.{role}.{min(_sharing(interface, lane)) if interface.divided else lane // interface.shards}"
    replica, place = divmod(lane, interface.lanes_of_copy)
    if group == ops.REPLICAS:
        return f"{group}.{role}.{place}"
    return f"{group}.{replica if group == WORLD else lane}"


def bound_interface(interface: Interface) -> Interface:
    """The interface of the whole machine: no lanes, all devices, all micro-batches, every group with its members."""
    groups: dict[str, list[GroupRow]] = {}
    for lane, devices in enumerate(interface.lanes):
        for role in range(len(devices)):
            for group in ops.LANE_GROUPS:
                name = group_name(interface, lane, role, group)
                if name not in groups:
                    groups[name] = [(member, "", "") for member in members_of(interface, lane, role, group)]
        for group, rows in interface.groups.items():
            bound = groups.setdefault(group_name(interface, lane, 0, group), [])
            bound += [(devices[role], stage, param) for role, stage, param in rows]
    return replace(
        interface,
        num_devices=interface.world_size,
        micro_batches=interface.total_micro_batches,
        groups={name: tuple(rows) for name, rows in groups.items()},
        lanes=(),
        shards=1,
        team=1,
        lane_micro_batches=(),
    )


def copies_group(stage: str) -> str:
    """The group of the devices of a lane that run a stage in turn, each on its micro-batches."""
    return f"{COPIES}.{stage}"


def norm_device(interface: Interface, stage: str, device: int) -> int:
    """The device in whose part of a norm the gradients count that `device` has of a stage: of devices that run it in
    turn, which have the same sum, the first."""
    name = copies_group(stage)
    found = [rows for group, rows in interface.groups.items() if group == name or group.startswith(f"{name}.")]
    return next((rows[0][0] for rows in found if device in [member for member, _, _ in rows]), device)


def members_of(interface: Interface, lane: int, role: int, group: str) -> list[int]:
    """The devices of the machine that a group of `ops.LANE_GROUPS`, or `WORLD`, joins with a lane's device, in the
    group's order."""
    each = interface.lanes_of_copy
    if group == WORLD:
        first = lane - lane % each
        return [device for other in interface.lanes[first : first + each] for device in other]
    if group == ops.TEAM:
        begin = lane - lane % interface.team
        return [interface.lanes[other][role] for other in range(begin, begin + interface.team)]
    among = _sharing(interface, lane) if group == ops.SHARDS else range(lane % each, len(interface.lanes), each)
    return [interface.lanes[other][role] for other in among]


def _sharing(interface: Interface, lane: int) -> range:
    """The lanes that share stages with a lane: neighbours, or, where members of a team have parts of weights, those in
    its place of several teams."""
    apart = interface.team if interface.divided else 1
    first = lane - lane % (interface.shards * apart) + lane % apart
    return range(first, first + interface.shards * apart, apart)


def team_of(interface: Interface, device: int) -> list[int]:
    """The devices of a device's team that have its place in their lanes, in order, by the interface of the whole
    machine; the device alone without one."""
    rows = (interface.members(name) for name in interface.groups if name.startswith(f"{ops.TEAM}."))
    return next((found for found in rows if device in found), [device])


def holders(interface: Interface, device: int) -> int:
    """The number of devices of a copy of the weights that have the same gradient of a parameter that is no part: the
    members of a team that divides parameters."""
    return len(team_of(interface, device)) if interface.divided else 1


def place_of(interface: Interface, device: int) -> tuple[int, int]:
    """Lane and role of a device of the machine."""
    if not interface.lanes:
        return 0, device
    return next((lane, row.index(device)) for lane, row in enumerate(interface.lanes) if device in row)


def slice_of(hardware: Hardware, lanes: Sequence[Sequence[int]]) -> Hardware:
    """A machine as one lane has it: the devices of the first lane, and its part of everything that several lanes share.
    A device has no more memory than the smallest device in the same place of any lane.

    Lanes share a host's DRAM, cores, disks, network and root complexes by the number of their devices there.
    """
    own = [hardware.devices[index] for index in lanes[0]]
    used = [hardware.devices[index] for lane in lanes for index in lane]
    on_host, on_complex = Counter(d.host for d in used), Counter((d.host, d.root_complex) for d in used)
    hosts = list(dict.fromkeys(device.host for device in own))
    found, place = [], dict[tuple[int, int], tuple[int, int]]()
    for number, index in enumerate(hosts):
        here = [device for device in own if device.host == index]
        part, host = len(here) / on_host[index], hardware.hosts[index]
        complexes: list[Any] = []
        for complex_ in dict.fromkeys(device.root_complex for device in here):
            place[index, complex_] = number, len(complexes)
            share = sum(d.root_complex == complex_ for d in here) / on_complex[index, complex_]
            rates = ("bandwidth_up", "bandwidth_down", "bandwidth_both")
            complexes.append(_scale(host.root_complexes[complex_], share, *rates))
        disks = [_scale(ssd, part, "size_bytes", "read_bandwidth", "write_bandwidth") for ssd in host.ssds]
        shared = (
            "dram_bytes",
            "model_bytes",
            "dram_bandwidth",
            "optimizer_params_per_s",
            "cpu_cores",
            "ssd_uplink_bandwidth",
        )
        found.append(_scale(host, part, *shared, root_complexes=complexes, ssds=disks))
    network = hardware.network
    if network is not None:
        on = Counter(host for lane in lanes for host in {hardware.devices[index].host for index in lane})
        racks = racks_of_lane(hardware, lanes)
        network = _scale(network, 1 / max(on[host] for host in hosts), "bandwidth", racks=racks)
    devices = []
    for role, device in enumerate(own):
        smallest = min((hardware.devices[lane[role]] for lane in lanes), key=lambda d: d.budget_bytes)
        number, complex_ = place[device.host, device.root_complex]
        memory = {
            name: getattr(smallest, name) for name in ("memory_bytes", "usable_fraction", "reserve", "model_bytes")
        }
        devices.append(device.model_copy(update={"host": number, "root_complex": complex_, **memory}))
    return Hardware(
        name=hardware.name,
        source=hardware.source,
        hosts=found,
        devices=devices,
        network=network,
        throttled=hardware.throttled,
    )


def _scale(part: Any, share: float, *names: str, **others: Any) -> Any:
    """A copy with a share of these amounts; whole numbers stay whole, and at least 1 if they are not 0."""
    update = dict(others)
    for name in names:
        amount = getattr(part, name)
        if amount:
            update[name] = max(1, int(amount * share)) if isinstance(amount, int) else amount * share
    return part.model_copy(update=update)


def written_out(interface: Interface, hardware: Hardware, most: int = WRITTEN_OUT) -> bool:
    """Whether all lanes are simulated and shown one by one: on at most `most` devices, or if lanes are not alike."""
    is_small = hardware.num_devices <= most or interface.smaller_shares
    return bool(is_small) or not are_alike(hardware, interface.lanes)


def shown(programs: Sequence[Program], hardware: Hardware, most: int = WRITTEN_OUT) -> tuple[list[Program], Hardware]:
    """The programs that are shown for a plan, and their machine: every device's program on the whole machine, or, if
    it has more than `most` devices and lanes are alike, those of a lane on its part of the machine."""
    interface = programs[0].interface
    if not interface.lanes or written_out(interface, hardware, most):
        return bind(programs), hardware
    return list(programs), slice_of(hardware, interface.lanes)


def lane_of(interface: Interface, hardware: Hardware) -> Hardware:
    """The part of a machine that the programs of a lane have."""
    return slice_of(hardware, interface.lanes) if interface.lanes else hardware


def are_alike(hardware: Hardware, lanes: Sequence[Sequence[int]]) -> bool:
    """Whether the machine looks the same from every lane: its devices, their hosts and root complexes, and the number
    of other lanes' devices there. Racks do not count: one lane's part has those of the lane in the most of them."""
    own = {index: hardware.devices[index] for lane in lanes for index in lane}
    kinds, hosts = hardware.device_kinds, hardware.host_kinds
    spread = [(lane, len({own[index].host for index in lane})) for lane in lanes]
    on_host = Counter((own[index].host, num_hosts) for lane, num_hosts in spread for index in lane)
    on_complex = Counter((device.host, device.root_complex) for device in own.values())
    outlooks = set()
    for lane in lanes:
        order = _number(own[index].host for index in lane)
        ports = _number((own[index].host, own[index].root_complex) for index in lane)
        rows = tuple((kinds[i], ports[own[i].host, own[i].root_complex]) for i in lane)
        below = tuple((hardware.hosts[h].root_complexes[c], on_complex[h, c]) for h, c in ports)
        places = tuple((hosts[h], on_host[h, len(order)]) for h in order)
        outlooks.add((rows, below, places, tuple(order[h] for h, _ in ports)))
    return len(outlooks) == 1


def _number(keys: Iterable[Any]) -> dict[Any, int]:
    """Each different key with its number, in the order in which they come."""
    found: dict[Any, int] = {}
    for key in keys:
        found.setdefault(key, len(found))
    return found
