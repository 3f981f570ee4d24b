"""The cost of a step's tasks on a machine: fixed seconds, and amounts that flow through shared resources.

- Computation: arithmetic, traffic to the device's memory and an overhead per launch, one after another.
- A transfer: the latency of its path, then its bytes through the path's links. An empty path is the host's own DRAM.
  Where the machine says what messages reach of a link's rate by their size, they move at that share of it.
- A collective: what each member copies inside its own memory, then the `Rounds` of `collectives.py`, one run after
  another. In a run, all neighbours send at the same time, after the latency of the slowest hop times the number of
  rounds.
- On the CPU: parameters through the host's optimizer rate, or bytes through its DRAM, shared by the host's devices.
  An update that may be undone first copies what it changes.
- Everything that CPU devices do also takes cores of their host (`cpu.py`).

Activations, gradients, inputs and collectives (priority 0) go before weights and offloaded gradients (priority 1):
computation waits for the former, and the latter are issued ahead of time. Weights that come through one root complex
share it; where their fetches have turns, those with the lowest turn come before all others (Mobius 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.call_mix import NO_CALLS
from ...ir.machine.hardware import Device, Hardware
from ...ir.machine.links import Link
from ...ir.program import WORLD, Interface, Program, Task, build_order, link_turn_of, members_of
from .collectives import Rounds, rounds_of
from .cpu import copying, core_flow, core_links, messaging, staged_links, update_s
from .sharing import Cost
from .symmetry import links_alike, repeating_lanes

URGENT, AHEAD = 0, 1
OWN_CALLS = 20  # the runtime's own work per op on the compute stream, in torch calls that take about as long


@dataclass(eq=False)
class WholeMachine:
    """The whole machine of which one lane is simulated, and the interface that lists all lanes.

    Of a regular fleet only the lanes after which everything repeats are looked at, and of a collective only what goes
    to and from their hosts.
    """

    hardware: Hardware
    interface: Interface
    models: dict[str, CostModel] = field(default_factory=dict)  # of the whole machine, by precision
    alike: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def lanes(self) -> int:
        """The number of lanes that stand for all."""
        return repeating_lanes(self.hardware, self.interface.lanes, self.interface.lanes_beside)

    @cached_property
    def near(self) -> set[int] | None:
        """The devices on the hosts of these lanes; None for all."""
        if self.lanes == len(self.interface.lanes):
            return None
        return {device for lane in self.interface.lanes[: self.lanes] for device in lane}

    def model(self, precision: str) -> CostModel:
        if precision not in self.models:
            self.models[precision] = CostModel(self.hardware, precision)
        return self.models[precision]

    def places(self, links: Iterable[str]) -> dict[str, set[str]]:
        """For each link of a lane's part of the machine, the links that the lanes have in its place."""
        if not self.alike:
            lanes = self.interface.lanes
            self.alike = links_alike(self.hardware, lanes, links, lanes[: self.lanes])
        return self.alike


class CostModel:
    """Costs of tasks on one machine, in one precision ("fp32", "bf16" or "fp16"). `fleet` is the whole machine if
    `hardware` is one lane's part of it."""

    def __init__(self, hardware: Hardware, precision: str, fleet: WholeMachine | None = None):
        self.hardware, self.fleet = hardware, fleet
        self.precision = precision
        self.links = {**hardware.links(), **_host_resources(hardware), **core_links(hardware), **staged_links(hardware)}
        self.by_size = {n for n, link in self.links.items() if link.message_shares or link.host_shares}
        self.sized: dict[tuple[str, float, int], str] = {}
        self.routes: dict[tuple[str, str], tuple[tuple[str, ...], float]] = {}
        self.known: dict[tuple[int, ops.Work, int], Cost] = {}

    def cost(self, task: Task) -> Cost:
        device, node, work = task.parts[0]
        if self.fleet is not None and work.group in (*ops.LANE_GROUPS, WORLD):
            return self.cost_over_lanes(device, work)
        if work.group:
            return self.collective([(d, w) for d, _, w in task.parts])
        if work.stream in (ops.SEND, ops.RECV):
            return self.transfer(device, work, URGENT)
        priority = AHEAD if op_of(node).transfers else URGENT
        turn = link_turn_of(node)
        if turn is not None:
            priority += turn
        key = (device, work, priority)
        if key not in self.known:
            self.known[key] = self.single(device, work, priority)
        return self.known[key]

    def single(self, device: int, work: ops.Work, priority: int) -> Cost:
        owner = self.hardware.devices[device]
        on_cpu = owner.kind == "cpu"
        if on_cpu and (work.stream == ops.COMPUTE or (work.stream == ops.CPU and work.params)):
            alone_s = self.update_s(owner, work) if work.params else self.compute_s(owner, work)
            return Cost(flows=(core_flow(owner, self.hardware, alone_s),))
        if work.stream == ops.COMPUTE:
            return Cost(self.compute_s(owner, work))
        if work.stream == ops.CPU and work.params:
            return Cost(flows=((_optimizer(owner.host), work.params + self.copied_params(owner, work)),))
        if work.stream == ops.CPU:
            return Cost(flows=((_dram(owner.host), work.traffic_bytes),))
        return self.transfer(device, work, priority) if work.source else Cost()

    def compute_s(self, owner: Device, work: ops.Work) -> float:
        measured_s = dict(work.seconds).get(owner.name)
        if measured_s is not None:
            return measured_s + OWN_CALLS * owner.op_overhead_s
        calls = work.launches + OWN_CALLS
        traffic_bytes = work.traffic_bytes + 2 * work.copied_bytes
        return owner.compute_s(work.flops, traffic_bytes, self.precision, calls, work.mix)

    def copied_params(self, owner: Device, work: ops.Work) -> float:
        """The parameters that the host would update in the time of an update's copies, for which it has the same cores
        and the same DRAM."""
        host = self.hardware.hosts[owner.host]
        return 2 * work.copied_bytes / host.dram_bandwidth * host.optimizer_params_per_s

    def update_s(self, owner: Device, work: ops.Work) -> float:
        """An update by a CPU device, with the copies that undo it."""
        copy_s = 2 * work.copied_bytes / owner.memory_bandwidth
        return copy_s + update_s(owner, self.hardware, work.params) + (work.launches + OWN_CALLS) * owner.op_overhead_s

    def transfer(self, device: int, work: ops.Work, priority: int) -> Cost:
        path, latency_s = self.route(self.memory(device, work.source), self.memory(device, work.target))
        path = self.for_messages(path, work.moved_bytes)
        owner = self.hardware.devices[device]
        use = copying(owner) if ops.DRAM in (work.source, work.target) else messaging(owner)
        if use in self.links:  # messages of GPUs are urgent; cores, which move the others, know no priorities
            path, priority = (*path, use), URGENT
        return Cost(latency_s, ((path, work.moved_bytes),), priority)

    def collective(self, members: Sequence[tuple[int, ops.Work]], near: Collection[int] | None = None) -> Cost:
        """`near`: leave out what goes between other devices than these."""
        work = members[0][1]
        copied_s = max(own.traffic_bytes / self.hardware.devices[device].memory_bandwidth for device, own in members)
        if len(members) == 1:  # all members are on one device, which adds them up in place
            return Cost(copied_s)
        moved_bytes = max(work.moved_bytes for _, work in members)
        memories = {device: self.meeting_place(device, own) for device, own in members}
        cost: Cost | None = None
        how = (work.rounds, work.hierarchical, work.pattern)
        for rounds in reversed(rounds_of(list(memories), self.hardware, moved_bytes, *how)):
            cost = self.rounds(rounds, memories, cost, near)
        assert cost is not None
        return replace(cost, fixed_s=cost.fixed_s + copied_s)

    def meeting_place(self, device: int, work: ops.Work) -> str:
        """The memory of a collective's member. For CPU devices it is the device's own process: they exchange the bytes
        of a collective as messages, also those in host memory."""
        on_cpu = self.hardware.devices[device].kind == "cpu"
        return self.memory(device, ops.DEVICE if on_cpu else work.source)

    def rounds(
        self, rounds: Rounds, memories: Mapping[int, str], then: Cost | None, near: Collection[int] | None = None
    ) -> Cost:
        flows, slowest_s = [], 0.0
        senders = [source for source, _ in rounds.hops] if self.by_size else []
        num_hosts = len({self.hardware.devices[device].host for device in senders})
        for (source, target), amount in rounds.hops.items():
            if near is not None and source not in near and target not in near:
                continue
            path, latency_s = self.route(memories[source], memories[target])
            path = self.for_messages(path, rounds.message_bytes, num_hosts)
            use = messaging(self.hardware.devices[source])
            flows.append(((*path, use) if use in self.links else path, amount))
            slowest_s = max(slowest_s, latency_s)
        return Cost(rounds.count * slowest_s, tuple(flows), URGENT, then)

    def cost_over_lanes(self, role: int, work: ops.Work) -> Cost:
        """A collective of devices in several lanes, while all other lanes do theirs. Each link gets the load of all
        lanes, scaled to this lane's part of the link. A link that only another lane loads, at the border of a host for
        example, delays this lane as well: the largest load of the lanes' corresponding links counts."""
        assert self.fleet is not None
        work = replace(work, flops=0.0, launches=0, tag="", workspace_bytes=0, mix=NO_CALLS)  # costs nothing here
        key = (role, work, URGENT)
        if key not in self.known:
            fleet, whole = self.fleet, self.fleet.model(self.precision)
            groups = {tuple(members_of(fleet.interface, lane, role, work.group)) for lane in range(fleet.lanes)}
            costs = [whole.collective([(device, work) for device in members], fleet.near) for members in sorted(groups)]
            found: Cost | None = None
            for parts in reversed(list(zip(*(cost.parts() for cost in costs), strict=True))):
                together: dict[int, list[str]] = {}  # amount -> the links that it passes, which have one rate
                for link, (amount, share) in self.load(parts, whole).items():
                    together.setdefault(round(amount), []).append(self.with_share(link, share))
                flows = tuple((tuple(links), float(amount)) for amount, links in together.items())
                found = Cost(max(part.fixed_s for part in parts), flows, URGENT, found)
            self.known[key] = found or Cost()
        return self.known[key]

    def load(self, parts: Sequence[Cost], whole: CostModel) -> dict[str, tuple[float, float]]:
        """For each link of this lane's part of the machine, the amount that all these flows of the whole machine put on
        it, and the share of its rate that they reach."""
        assert self.fleet is not None
        there: dict[str, tuple[float, float]] = {}  # link -> seconds at what the flows reach, and at its rate
        for path, amount in (flow for part in parts for flow in part.flows):
            for name in path:
                link = whole.links[name]
                busy_s, least_s = there.get(link.part_of or name, (0.0, 0.0))
                rate = whole.links[link.part_of].bandwidth if link.part_of else link.bandwidth
                there[link.part_of or name] = busy_s + amount / link.bandwidth, least_s + amount / rate
        found = {}
        own_links = [name for name, link in self.links.items() if link.part_of is None]
        for own, alike in self.fleet.places(own_links).items():
            busiest_s, least_s = max(there.get(name, (0.0, 0.0)) for name in alike)
            if busiest_s:
                found[own] = least_s * self.links[own].bandwidth, least_s / busiest_s
        return found

    def for_messages(self, path: tuple[str, ...], message_bytes: float, num_hosts: int = 2) -> tuple[str, ...]:
        """The links that messages of this size pass on a path, in a collective over `num_hosts` hosts."""
        if self.by_size.isdisjoint(path):
            return path
        return tuple(
            self._sized_link(name, message_bytes, num_hosts) if name in self.by_size else name for name in path
        )

    def _sized_link(self, name: str, message_bytes: float, num_hosts: int) -> str:
        key = (name, message_bytes, num_hosts)
        if key not in self.sized:
            link = self.links[name].for_messages(message_bytes, num_hosts)
            self.links[link.name] = link
            self.sized[key] = link.name
        return self.sized[key]

    def with_share(self, name: str, share: float) -> str:
        """The name of the link of flows that reach this share of a link's rate."""
        link = self.links[name].with_share(share)
        self.links[link.name] = link
        return link.name

    def memory(self, device: int, name: str) -> str:
        """The machine's name for the memory that a program of `device` calls "device", "dram", "ssd" or "device3"."""
        if name in (ops.DRAM, ops.SSD):
            return f"{name}{self.hardware.devices[device].host}"
        return self.hardware.devices[device if name == ops.DEVICE else int(name.removeprefix("device"))].name

    def route(self, source: str, target: str) -> tuple[tuple[str, ...], float]:
        """Links between two memories, and the seconds of an empty transfer."""
        if (source, target) not in self.routes:
            path = tuple(self.hardware.path(source, target)) or _dram(self.hardware.host_of(target))
            latency_s = self.hardware.latency_s(source, target) or sum(self.links[name].latency_s for name in path)
            self.routes[source, target] = (path, latency_s)
        return self.routes[source, target]


def costs_of(programs: Sequence[Program], model: CostModel) -> list[list[Cost]]:
    """For each device, the cost of each of its ops in text order; ops that occupy no stream cost nothing."""
    order = build_order(programs, {})
    free = Cost()
    return [
        [model.cost(order.tasks[order.task_of[node]]) if op_of(node).streams else free for node in program.ops()]
        for program in programs
    ]


def _optimizer(host: int) -> tuple[str, ...]:
    return (f"host{host}.optimizer",)


def _dram(host: int) -> tuple[str, ...]:
    return (f"host{host}.dram",)


def _host_resources(hardware: Hardware) -> dict[str, Link]:
    """The optimizer rate and DRAM of each host, which its devices share, as links (amounts per second)."""
    found = {}
    for index, host in enumerate(hardware.hosts):
        for (name,), rate in ((_optimizer(index), host.optimizer_params_per_s), (_dram(index), host.dram_bandwidth)):
            found[name] = Link(name, f"dram{index}", f"dram{index}", rate, 0.0)
    return found
