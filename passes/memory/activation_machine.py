"""The costs of one device's step and the room in its memories, as far as `choose-activations` must know them before
swapping and the optimizer are decided: seconds of stages, shares of links, room beside weights and optimizer states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ...graph.costs.stage_time import stage_seconds
from ...graph.turn_seconds import TurnSeconds
from ...ir import ops
from ...ir.machine.hardware import Device, Hardware
from ...ir.ops import aligned_class, update_traffic
from ...ir.program import Interface, Program, StageSpec, operands, persistent_bytes, profile_memory
from ...runtime.simulate.cpu import update_s as cpu_update_s
from ..draft import Draft
from ..equal_programs import look, once
from ..phases import fetched_phases, phases
from .activation_plan import Half, Item, LinkRates, Room
from .fetch_queue import Fetches, arena_bytes
from .insert_fetch import bytes_beside_arena

BUFFERS = 4  # of a stage on SSD, in DRAM: one is read, one updated, one written, one receives gradients
GRADIENTS = 2  # of stages, in DRAM: one is received while one is updated
SSD_SHARE = 0.9  # the share of the disks that is used; the rest is for what an update must be able to undo


@dataclass(frozen=True)
class Tiers:
    """The shares of the swapped weights and of their optimizer states on SSD, and the room that these leave there and
    in DRAM for the activations of one device; below 0, DRAM lacks these bytes."""

    weights: float
    states: float
    dram_bytes: float
    ssd_bytes: float


@dataclass(frozen=True)
class Machine:
    """One device with its stages. `counts`: micro-batches of each stage; `tiers`: if weights are swapped; `resident`:
    the stages that stay even then."""

    interface: Interface
    device: Device
    specs: tuple[StageSpec, ...]
    counts: dict[str, int]
    trained: frozenset[str]
    precision: str
    swap: bool
    rates: LinkRates
    has_ssd: bool
    updates_per_s: float  # parameters per second that the CPU updates
    update_s: float  # seconds to update all stages on the device, if their states are there
    resident_s: float  # and those of the resident stages
    tiers: Tiers
    free: Tiers  # the same where all weights stay
    messages: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))  # received, sent; in forward, in backward
    resident: frozenset[str] = frozenset()
    took: dict[Hashable, TurnSeconds] = field(default_factory=dict, compare=False, repr=False)  # by stage
    known: dict[Hashable, list[Item]] = field(default_factory=dict, compare=False, repr=False)  # items by stage

    @property
    def budget_bytes(self) -> int:
        return self.device.budget_bytes

    @property
    def moving(self) -> list[StageSpec]:
        """The stages whose weights come from DRAM, if any do."""
        return [spec for spec in self.specs if spec.name not in self.resident]

    def look(self, program: Program) -> Hashable:
        """A key that is equal for devices that can take each other's decisions, stage by stage and class by class."""
        stages = tuple(
            (self.counts[spec.name], self.seconds(spec), tuple((i.bytes, i.saved_s) for i in self.items(spec)))
            for spec in self.specs
        )
        shares = (self.rates, self.has_ssd, self.updates_per_s, self.update_s, self.tiers, self.free, self.messages)
        stays = tuple(spec.name in self.resident for spec in self.specs)
        return look(program, self.specs), self.budget_bytes, stages, shares, stays

    def room(self, swapped: bool, device_bytes: float) -> Room:
        tiers = self.tiers if swapped else self.free
        return Room(device_bytes, tiers.dram_bytes, tiers.ssd_bytes)

    def keeps_all(self, program: Program) -> bool:
        """Whether nothing need leave the device or be computed again."""
        least_bytes = sum(self.counts[spec.name] * spec.kept_bytes for spec in self.specs if spec.name in self.trained)
        if least_bytes > self.budget_bytes:
            return False
        return any(self.room_bytes(program, swapped) >= 0 for swapped in {self.swap, True})

    def must_swap(self, program: Program) -> bool:
        """Whether weights and optimizer states do not all fit beside what the program takes, or are swapped anyway."""
        lasting_bytes = self.states_bytes + persistent_bytes(program).total(ops.DEVICE)  # no profile of large models
        return self.swap or lasting_bytes > self.budget_bytes or self.resident_room_bytes(program) < 0

    def resident_room_bytes(self, program: Program) -> float:
        return self.budget_bytes - self.states_bytes - profile_memory(program).peak_bytes[ops.DEVICE]

    @property
    def states_bytes(self) -> int:
        return sum(self.interface.optimizer_bytes(spec) for spec in self.specs)

    def room_bytes(self, program: Program, swapped: bool) -> float:
        """Device memory that the program leaves beside all weights and states or, swapped, beside two stages' weights
        wherever two may be there; negative where it lacks some."""
        if not swapped:
            return self.resident_room_bytes(program)
        names = [spec.name for spec in self.moving]
        order, specs = phases(program), program.interface.stages
        early = {i: len(specs[order[i].stage].moving) for i in fetched_phases(order, names) if i > 0}
        two_stages = arena_bytes(order, specs, names, Fetches(early))
        return self.budget_bytes - bytes_beside_arena(program, names) - two_stages

    def seconds(self, spec: StageSpec) -> TurnSeconds:
        has_backward = spec.name in self.trained
        return once(self.took, spec.name, lambda: stage_seconds(spec, self.device, self.precision, has_backward))

    def items(self, spec: StageSpec) -> list[Item]:
        """The stage's classes of saved tensors, for all its micro-batches."""
        return once(self.known, spec.name, lambda: self._items(spec))

    def _items(self, spec: StageSpec) -> list[Item]:
        count = self.counts[spec.name]
        measured = any(name == self.device.name for name, *_ in spec.seconds)
        again_s = self.seconds(spec).rematerialise_s

        def spared_s(flops: float) -> float:
            if measured:
                return again_s - spec.again_s(self.device.name, again_s, flops)
            return self.device.compute_s(flops, 0.0, self.precision, 0, spec.forward_mix)

        return [
            Item(spec.name, saved.name, count * aligned_class(saved), count * spared_s(saved.flops))
            for saved in spec.saved
        ]

    def halves(self, again: Collection[str], swapped: bool) -> tuple[Half, Half]:
        """The two halves of the step if these stages are rematerialised and keep no class (eq. 3, 4, 6 to 8)."""
        forward_s = backward_s = 0.0
        for spec in self.specs:
            took, count = self.seconds(spec), self.counts[spec.name]
            forward_s += count * took.forward_s
            backward_s += count * (took.long_backward_s if spec.name in again else took.backward_s)
        received, sent, received_back, sent_back = self.messages
        if not swapped:
            forward = Half(forward_s, h2d_bytes=received, d2h_bytes=sent)
            return forward, Half(backward_s + self.update_s, h2d_bytes=received_back, d2h_bytes=sent_back)
        weights = sum(spec.weight_bytes for spec in self.moving)
        # The weights of the last stage, and of those that keep everything, stay for their backward.
        twice = sum(spec.weight_bytes for spec in self.moving[:-1] if spec.name in again)
        updated = [spec for spec in self.moving if spec.name in self.trained and not spec.staying]
        states = sum(self.interface.states_bytes(spec) for spec in updated)
        grads = sum(spec.grad_bytes for spec in updated)
        trained = sum(spec.trained_params for spec in updated)
        rewritten = sum(spec.weight_bytes for spec in updated if spec.trained_params)
        on_ssd, states_on_ssd = self.tiers.weights, self.tiers.states * states
        with_states = (
            0.0 if self.interface.master else on_ssd * rewritten
        )  # where weights are masters they are read with them
        forward = Half(forward_s, h2d_bytes=weights + received, d2h_bytes=sent, read_bytes=on_ssd * weights)
        backward = Half(
            backward_s + self.resident_s,
            cpu_s=trained / self.updates_per_s,
            h2d_bytes=twice + received_back,
            d2h_bytes=grads + sent_back,
            read_bytes=on_ssd * twice + states_on_ssd + with_states,
            write_bytes=states_on_ssd + on_ssd * rewritten,
        )
        return forward, backward


def machine_of(draft: Draft, program: Program, *, swap: bool, tier: str) -> Machine:
    """The machine as one device's program sees it; devices of one host share its links, memories and CPU equally."""
    hardware = draft.lane_hardware
    owner = hardware.devices[program.device]
    neighbours = _neighbours(draft, owner)
    specs = tuple(stage.spec for stage in draft.stages_on(program.device))
    nodes = list(program.ops())
    counts = Counter(str(n.args[0]) for n in nodes if n.target is ops.forward)
    return Machine(
        interface=program.interface,
        device=owner,
        specs=specs,
        counts=counts,
        trained=frozenset(str(n.args[0]) for n in nodes if n.target is ops.backward),
        precision=draft.options.precision,
        swap=swap,
        rates=_rates(hardware, program.device, neighbours),
        has_ssd=bool(hardware.hosts[owner.host].ssds),
        updates_per_s=hardware.hosts[owner.host].optimizer_params_per_s / len(neighbours),
        update_s=_update_s(hardware, owner, program.interface, specs, draft.options.precision),
        free=_tiers(draft, program.interface, owner.host, neighbours, ""),
        messages=_messages(nodes),
        **_where_some_stay(draft, program.interface, owner, specs, neighbours, tier),
    )


def if_resident(machine: Machine, draft: Draft, resident: frozenset[str], tier: str) -> Machine:
    """A machine of the draft as it is if these stages stay on their devices."""
    neighbours = _neighbours(draft, machine.device)
    draft = replace(draft, resident=resident)
    made = _where_some_stay(draft, machine.interface, machine.device, machine.specs, neighbours, tier)
    return replace(machine, **made)


def _neighbours(draft: Draft, owner: Device) -> list[int]:
    """The devices of one host that have programs."""
    devices = draft.lane_hardware.devices
    return [p.device for p in draft.programs if devices[p.device].host == owner.host]


def _where_some_stay(
    draft: Draft, interface: Interface, owner: Device, specs: Sequence[StageSpec], neighbours: list[int], tier: str
) -> dict[str, Any]:
    """The fields of a machine that follow from the draft's resident stages."""
    own = [spec for spec in specs if spec.name in draft.resident]
    return {
        "resident": draft.resident,
        "resident_s": _update_s(draft.lane_hardware, owner, interface, own, draft.options.precision),
        "tiers": _tiers(draft, interface, owner.host, neighbours, tier),
    }


def _update_s(
    hardware: Hardware, owner: Device, interface: Interface, specs: Sequence[StageSpec], precision: str
) -> float:
    launches = sum(len(spec.params) for spec in specs)
    params = sum(spec.trained_params for spec in specs)
    if owner.kind == "cpu":
        return cpu_update_s(owner, hardware, params) + launches * owner.op_overhead_s
    states = sum(interface.state_bytes(spec) for spec in specs)
    return owner.compute_s(0.0, update_traffic(params, states), precision, launches)


def _rates(hardware: Hardware, device: int, neighbours: list[int]) -> LinkRates:
    name, host = hardware.devices[device].name, hardware.devices[device].host
    dram, disks = f"dram{host}", f"ssd{host}"
    names = [hardware.devices[d].name for d in neighbours]

    def rate_of(route: tuple[str, str], all_routes: Iterable[tuple[str, str]]) -> float:
        users = Counter(link for ends in all_routes for link in hardware.path(*ends))
        links = hardware.links()
        return min((links[link].bandwidth / users[link] for link in hardware.path(*route)), default=float("inf"))

    down, up = [(dram, other) for other in names], [(other, dram) for other in names]
    read = write = float("inf")
    if hardware.hosts[host].ssds:
        read = rate_of((disks, dram), [(disks, dram)] * len(names))
        write = rate_of((dram, disks), [(dram, disks)] * len(names))
    links = rate_of((dram, name), down), rate_of((name, dram), up), read, write
    owner = hardware.devices[device]
    if owner.kind != "cpu":
        return LinkRates(*links)
    cores = hardware.hosts[host].cpu_cores / len(names)
    copying = 0.0 if hardware.throttled else 1 / (owner.h2d_bandwidth * cores)  # throttled copies sleep instead
    return LinkRates(*links, min(owner.threads / cores, 1.0), copying)


def _tiers(draft: Draft, interface: Interface, host: int, neighbours: list[int], tier: str) -> Tiers:
    """DRAM goes to weights first, then to states, then to activations; buffers of whole stages are there only where
    some are on SSD. `tier`: as insert-ssd will get it; "" where all weights and states stay on their devices."""
    homes = zip(draft.stages, draft.devices)
    moving = [(stage.spec, home) for stage, home in homes if stage.spec.name not in draft.resident]
    specs = [spec for spec, home in moving if tier and home in neighbours]
    weights = sum(spec.weight_bytes for spec in specs)
    states = sum(interface.states_bytes(spec) for spec in specs if not spec.staying)
    hardware = draft.lane_hardware
    disks = hardware.budget_bytes(f"ssd{host}") * SSD_SHARE if hardware.hosts[host].ssds else 0.0
    updated = [spec for spec in specs if not spec.staying]
    buffers = GRADIENTS * len(neighbours) * max((spec.grad_bytes for spec in updated), default=0)
    dram = hardware.dram_budget_bytes(host)
    if disks and (tier in ("states", "all") or weights + states + buffers > dram):
        buffers = BUFFERS * len(neighbours) * max((interface.all_bytes(spec) for spec in updated), default=0)
    dram -= buffers
    missing = weights + states - dram if disks else 0.0
    states_share = min(1.0, max(0.0, missing / states)) if states else 0.0
    weights_share = min(1.0, max(0.0, (missing - states) / weights)) if weights else 0.0
    if disks and tier in ("states", "all"):
        states_share, weights_share = 1.0, 1.0 if tier == "all" else weights_share
    elif tier == "none":
        states_share = weights_share = 0.0
    left = dram - (1 - weights_share) * weights - (1 - states_share) * states
    disks -= weights_share * weights + states_share * states
    return Tiers(weights_share, states_share, left / len(neighbours), max(0.0, disks) / len(neighbours))


def _messages(nodes: Iterable[fx.Node]) -> tuple[int, int, int, int]:
    """Bytes that messages bring and take, before the first backward and from there on."""
    found = [0, 0, 0, 0]
    half = 0
    for node in nodes:
        if node.target is ops.backward:
            half = 2
        elif node.target is ops.recv:
            found[half] += node.meta["type"].bytes
        elif node.target is ops.send:
            found[half + 1] += operands(node)[0].meta["type"].bytes
    return found[0], found[1], found[2], found[3]
