"""The communicators of GPUs, and which messages share one.

NCCL runs what one communicator is given on a rank one after another, in the order of issue, whatever the streams. A
program's sends are one such sequence already, and its receives another one. So messages may share a communicator if no
device both sends and receives in it: that adds no wait, and what `check_deadlock` proves still holds. In one for both
directions a receive that is issued ahead of its turn would hold up the sends that its peer needs first.

`k` communicators are enough if each device can be given a set of k / 2 of them, in which it sends, that differs from
the sets of all with which it exchanges messages: a message takes one that its sender has and its receiver has not. Two
are enough for a line of devices, and for a ring of an even number.

What is taken of a GPU's memory is known from NCCL 2.30's source, where the machine's description has no measured bytes.
A communicator at rest has two allocations, and three for each channel (`devCommSetup` in init.cc, `initChannel` in
channel.cc), each of whole 2 MiB (`ncclCuMemAlloc` in alloc.h). In each of its channels a connection has buffers for
three protocols, 512 KiB, 4.69 MiB and 4 MiB (`computeBuffSizes` in init.cc), at the receiver, and a head at the sender,
both in whole 2 MiB (transport/p2p.cc). With another host both sides have buffers (transport/net.cc); without P2P host
memory has them (transport/shm.cc). A ring connects each member to the next, and a tree of more than
two does so once more. Sums in NVLink's switches (NVLS) take more, which only a measurement knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from math import comb

from torch import fx

from .. import ops
from ..calls import op_of
from ..machine.hardware import Hardware
from .lanes import bind_one
from .order import Order
from .program import Program, work_of
from .seats import seats_of

GRAIN_BYTES = 2 << 20  # of an allocation
RECEIVER_BYTES, SENDER_BYTES = 5 * GRAIN_BYTES, GRAIN_BYTES  # of a channel of a connection
# The most blocks of a kernel of messages, each of which holds an SM while it waits, so the most channels of a
# connection. NCCL's own choice is two for each NVLink, rounded up to a power of two (`ncclTopoGetNchannels` in
# graph/paths.cc), and two over PCIe and to another host.
MESSAGE_BLOCKS = 16
GROUP_CHANNELS = 32  # of a group over NVLink, at most
OTHER_CHANNELS = 2
BY_HOST = "by host"  # how a group meets in a hierarchical gather, beside the patterns of ops


@dataclass(frozen=True)
class Communicator:
    """`members`: its devices, in order of rank; `pairs`: the (source, destination) of the messages that it carries."""

    members: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return "messages/" + ",".join(f"{source}-{target}" for source, target in self.pairs)


def message_communicators(pairs: Collection[tuple[int, int]]) -> list[Communicator]:
    """The fewest communicators, by a greedy colouring, that carry messages between these pairs of devices. All devices
    find the same."""
    peers: dict[int, set[int]] = {}
    for source, target in pairs:
        peers.setdefault(source, set()).add(target)
        peers.setdefault(target, set()).add(source)
    found: list[Communicator] = []
    done: set[int] = set()
    for first in sorted(peers):
        if first in done:
            continue
        colours = _colours(first, peers)
        done |= colours.keys()
        number = next(k for k in count(2) if comb(k, k // 2) > max(colours.values()))
        sending = list(combinations(range(number), number // 2))
        carried: dict[int, list[tuple[int, int]]] = {}
        for source, target in sorted(pair for pair in set(pairs) if pair[0] in colours):
            free = set(sending[colours[source]]) - set(sending[colours[target]])
            carried.setdefault(min(free), []).append((source, target))
        for _, own in sorted(carried.items()):
            found.append(Communicator(tuple(sorted({device for pair in own for device in pair})), tuple(own)))
    return found


def _colours(first: int, peers: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Numbers, of the devices that messages join to `first`, that differ between any two that exchange messages."""
    colours: dict[int, int] = {}
    order = [first]
    for device in order:  # grows while it is walked
        taken = {colours[peer] for peer in peers[device] if peer in colours}
        colours[device] = next(colour for colour in count() if colour not in taken)
        order += [peer for peer in sorted(peers[device]) if peer not in order]
    return colours


def pair_of(device: int, node: fx.Node, peer: int) -> tuple[int, int]:
    """The source and the destination of a message that a device sends or receives."""
    return (device, peer) if node.target is ops.send else (peer, device)


def add_communicator_waits(order: Order, programs: Sequence[Program], on_gpu: Collection[int]) -> None:
    """Let what a GPU gives to one communicator wait for what it gave to it before. If no ring of waits comes of it,
    there is one order of all operations of all GPUs that agrees with the order of issue in each communicator.

    A GPU's communicators hold no more kernels at once than it has streams of messages and collectives, which is three.
    """
    messages = [(p.device, n, order.work_of[n].peer) for p in programs for n in p.ops() if op_of(n).meets == ops.PEER]
    pairs = {pair_of(*message) for message in messages}
    carriers = {pair: each.name for each in message_communicators(pairs) for pair in each.pairs}
    for program in programs:
        last: dict[str, int] = {}
        for node in program.ops() if program.device in on_gpu else ():
            work, index = order.work_of[node], order.task_of[node]
            name = ""
            if op_of(node).meets == ops.PEER:
                name = carriers[pair_of(program.device, node, work.peer)]
            elif op_of(node).meets == ops.GROUP and ops.DRAM not in (work.source, work.target):
                members = {device for device, _, _ in program.interface.groups.get(work.group, ())}
                name = f"group/{','.join(map(str, sorted(members))) or work.group}"
            if name:
                if name in last:
                    order.tasks[index].waits.append((last[name], f"follows in the communicator {name}"))
                last[name] = index


@dataclass(frozen=True)
class GpuConnections:
    """The numbers of communicators that NCCL makes on a GPU, for messages and for groups, and of their connections in
    one direction; the most bytes of both before they are used, and of the connections' buffers. `measured`: by the
    bytes that the machine's description has, else by those of NCCL's source."""

    messages: int
    groups: int
    connections: int
    rest_bytes: int
    buffer_bytes: int
    measured: bool

    @property
    def num_bytes(self) -> int:
        return self.rest_bytes + self.buffer_bytes


def reserve_communicators(programs: Sequence[Program], hardware: Hardware) -> Hardware:
    """The machine, with the bytes that the programs' communicators take in the reserve of each GPU, where these are
    more than the reserve has for messages. The devices of all lanes have what those of the first have. A GPU without a
    reserve is a part of one, whose rest has room."""
    if hardware.num_devices == 1 or all(device.reserve is None for device in hardware.devices):
        return hardware
    first = gpu_connections([bind_one(program, 0) for program in programs], hardware)
    lanes = programs[0].interface.lanes or [range(hardware.num_devices)]
    taken_bytes = {lane[role]: first[d].num_bytes for role, d in enumerate(lanes[0]) if d in first for lane in lanes}
    devices = list(hardware.devices)
    for index, device in enumerate(devices):
        if device.reserve is not None and device.reserve.messages_bytes < taken_bytes.get(index, 0):
            reserve = device.reserve.model_copy(update={"messages_bytes": taken_bytes[index]})
            devices[index] = device.model_copy(update={"reserve": reserve})
    if devices == hardware.devices:
        return hardware
    fields = {name: getattr(hardware, name) for name in type(hardware).model_fields}
    return Hardware(**{**fields, "devices": devices})  # a copy would take cached budgets along


def gpu_connections(programs: Sequence[Program], hardware: Hardware) -> dict[int, GpuConnections]:
    """Per device that is a GPU and meets others. The programs are of one function, with the machine's devices."""
    pairs: set[tuple[int, int]] = set()
    groups: dict[int, dict[tuple[int, ...], set[str]]] = {}  # by members, how they meet
    for program in programs:
        own = groups.setdefault(program.device, {})
        for node in program.ops():
            work = work_of(program, node)
            if op_of(node).meets == ops.PEER:
                pairs.add(pair_of(program.device, node, work.peer))
            elif op_of(node).meets == ops.GROUP and ops.DRAM not in (work.source, work.target):
                members = tuple(dict.fromkeys(row[0] for row in program.interface.groups[work.group]))
                own.setdefault(members, set()).add(BY_HOST if work.hierarchical else work.pattern)
    carriers = message_communicators(pairs)
    found = {}
    for device, own in groups.items():
        memory = NcclMemory(hardware, device)
        ways = [(pair, MESSAGE_BLOCKS) for pair in pairs if device in pair]
        rings: list[tuple[int, int]] = []
        own = {members: patterns for members, patterns in own.items() if len(members) > 1}
        number = len(own)
        for members, patterns in own.items():
            near = ring_of(members, device)
            rings += _ring_and_tree(members, device)
            peers = set(members) - {device} if ops.PAIRS in patterns else set()
            peers |= {near[0][0], near[1][1]} if ops.RING_STEP in patterns else set()
            ways += [(pair, GROUP_CHANNELS) for peer in peers for pair in ((peer, device), (device, peer))]
            seats = seats_of([hardware.devices[member].host for member in members], members.index(device))
            if BY_HOST in patterns and seats.hosts:  # messages between hosts, a communicator inside each
                number += seats.contiguous
                between = ring_of([members[seat] for seat in seats.seats_of_hosts], device)
                inside = [members[seat] for seat in seats.here]
                rings += _ring_and_tree(inside, device) if seats.contiguous else []
                between += [] if seats.contiguous else ring_of(inside, device)
                ways += [(pair, GROUP_CHANNELS) for pair in between]
        if (ways or rings) and hardware.devices[device].kind == "cuda":
            messages = sum(device in each.members for each in carriers)
            buffer_bytes = sum(memory.message_bytes(*way) for way in ways) + sum(map(memory.group_bytes, rings))
            rest_bytes = memory.rest_bytes(messages, number)
            measured = memory.measured is not None
            connections = len(ways) + len(rings)
            found[device] = GpuConnections(messages, number, connections, rest_bytes, buffer_bytes, measured)
    return found


def connections_of_group(count: int) -> int:
    """The connections of each of `count` members by which NCCL gathers and adds up: a tree of two members is a ring."""
    return 2 if count == 2 else 4


def ring_of(members: Sequence[int], device: int) -> list[tuple[int, int]]:
    """The pairs of a device with the members before and after it in the ring of all."""
    here = members.index(device)
    return [(members[here - 1], device), (device, members[(here + 1) % len(members)])]


def _ring_and_tree(members: Sequence[int], device: int) -> list[tuple[int, int]]:
    """The connections of a device by which NCCL adds up and gathers."""
    return ring_of(members, device) * (connections_of_group(len(members)) // 2)


class NcclMemory:
    """The bytes of one GPU that communicators take, as measured on its host, or the most by NCCL's source."""

    def __init__(self, hardware: Hardware, device: int):
        self.hardware, self.device = hardware, device
        self.host = hardware.hosts[hardware.devices[device].host]
        self.measured = self.host.communicators

    def rest_bytes(self, messages: int, groups: int) -> int:
        """The bytes of communicators for messages and for groups, before they are used."""
        if self.measured is not None:
            return self.measured.library_bytes + (messages + groups) * self.measured.rest_bytes
        channels = (MESSAGE_BLOCKS, GROUP_CHANNELS) if self.host.nvlink_bandwidth else (OTHER_CHANNELS, OTHER_CHANNELS)
        grains = [2 + 3 * count for count in channels]
        return GRAIN_BYTES * (messages * grains[0] + groups * grains[1])

    def message_bytes(self, pair: tuple[int, int], channels: int) -> int:
        """The bytes at this GPU of a connection by which one GPU sends to another, over at most this many channels."""
        sends = self.device == pair[0]
        if self.leaves_host(pair):
            return OTHER_CHANNELS * RECEIVER_BYTES
        if self.measured is not None:
            own_bytes = self.measured.sender_bytes if sends else self.measured.receiver_bytes
            return own_bytes * channels // MESSAGE_BLOCKS
        return self.channels(pair, channels) * (SENDER_BYTES if sends else RECEIVER_BYTES)

    def group_bytes(self, pair: tuple[int, int]) -> int:
        """The bytes at this GPU of one direction of a ring or a tree."""
        if self.measured is not None and not self.leaves_host(pair):
            return self.measured.group_bytes
        return self.message_bytes(pair, GROUP_CHANNELS)

    def leaves_host(self, pair: tuple[int, int]) -> bool:
        source, target = (self.hardware.devices[end] for end in pair)
        return source.host != target.host

    def channels(self, pair: tuple[int, int], most: int) -> int:
        """The channels of a connection inside the host that have buffers in the memory of GPUs."""
        if self.host.nvlink_bandwidth is not None:
            return most
        source, target = (self.hardware.devices[end] for end in pair)
        direct = self.host.p2p and source.root_complex == target.root_complex
        return OTHER_CHANNELS if direct else 0
