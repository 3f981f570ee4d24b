"""The numbers of a partition problem: what a run of blocks takes on each device, as sums over its blocks.

In: a draft with blocks. Out: a `MipProblem`; `recurrence`, `local_search` and `proof` know nothing but its numbers
(Mobius table 2): per block T^f and T^b with and without rematerialisation, the bytes of its upload and of its
gradients; per run of blocks its memory S and the bytes that enter it; per device its memory G, its links and its root
complex. Stage j runs on device j mod N of the order. Identical blocks have one kind.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from torch import fx

from ...graph.blocks import Block
from ...graph.boundaries import narrow_nodes, value_bytes
from ...graph.costs.stage import storages
from ...graph.costs.stage_time import MessageTimes, block_seconds
from ...graph.turn_seconds import TurnSeconds
from ...ir.errors import PlanError
from ...ir.machine.hardware import Device, Hardware
from ...ir.ops import update_traffic
from ...ir.precision import Precision
from ...runtime.simulate.costs import OWN_CALLS
from ..draft import Draft
from ..partition.slices import Slices

CLIPPING_SHOWS = 0.5  # of the time for clipping by several devices, the part that no update hides
LIKE = 0.8  # blocks are unlike where no kind has this share of all
SHORT = 4  # runs of up to this number of blocks are told apart block by block
Table = list[list[float]]  # [end][start] of a run of blocks


@dataclass(frozen=True)
class Unit:
    """One device: memory, links and rates. `complex`: index of its root complex; `host` of its host."""

    budget_bytes: float
    fetch_s: float  # seconds per byte from DRAM, alone
    offload_s: float  # seconds per byte to DRAM, alone
    shared_fetch_s: float  # seconds per byte through the root complex
    shared_offload_s: float
    shared_both_s: float = 0.0  # seconds per byte in either direction while both are busy; 0: neither slows the other
    latency_s: float = 0.0
    own_s: float = 0.0  # seconds of the runtime around one op
    step_s: float = 0.0  # seconds per parameter of an update on the device
    call_s: float = 0.0  # seconds of one torch call
    byte_s: float = 0.0  # seconds per byte of the device's own memory
    complex: int = 0
    host: int = 0


@dataclass(frozen=True)
class UpdateCost:
    """The costs of an optimizer step. `barrier`: every step waits for a norm over all gradients."""

    params_s: tuple[float, ...]  # seconds per parameter on the CPU, by host
    bytes_s: tuple[float, ...]  # seconds per byte through DRAM, by host
    state_bytes: float  # per parameter, masters included
    barrier: bool = False

    def clip_s(self, host: int, num_devices: int) -> float:
        """Seconds per byte of gradients that clipping adds to the updates of `num_devices` devices of a host: where one
        clips while another one steps, it adds nothing, and where all clip at once, everything."""
        return 2 * self.bytes_s[host] * (1.0 if num_devices == 1 else CLIPPING_SHOWS)


@dataclass(frozen=True)
class MipProblem:
    """Sums are running: entry i counts blocks[:i]. `[d]` is the d-th device of the order."""

    names: tuple[str, ...]
    kinds: tuple[int, ...]  # number of each block's kind: equal for identical blocks
    units: tuple[Unit, ...]
    micro_batches: int
    forward_s: list[list[float]]  # [d][i]
    backward_s: list[list[float]]  # [d][i], without rematerialisation
    again_s: list[list[float]]  # [d][i]: what rematerialisation adds
    weight_bytes: list[float]
    grad_bytes: list[float]
    params: list[float]
    tensors: list[float]  # number of parameter tensors
    kept_bytes: list[float]
    work_bytes: Table  # gradients, saved tensors of one micro-batch and workspace: all but the weights
    input_bytes: Table
    message_bytes: list[float]  # what crosses the cut before block i, for one micro-batch
    message_s: list[list[float]]  # seconds per byte from device d to device e
    message_latency_s: list[list[float]]
    message_shares: list[list[bool]]  # whether it goes through the root complexes
    update: UpdateCost
    ties: tuple[
        tuple[int, int, float], ...
    ] = ()  # first and last block that use a trained parameter, the bytes of its gradient
    order: tuple[int, ...] = field(default=())
    swap: bool = False  # weights come from DRAM also where they could stay
    always: bool = False  # every stage runs its forward again, whatever memory there is
    ordered: bool = False  # fetches through a root complex go by turn instead of sharing it
    placed: dict[Hashable, tuple[float, list[int]]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    def need_bytes(self, a: int, b: int, rounds: int) -> float:
        """Least device memory of blocks[a:b] on a device with `rounds` stages (`slices.StageNeed`)."""
        weights = self.weight_bytes[b] - self.weight_bytes[a]
        return weights + self.work_bytes[b][a] + (self.micro_batches * rounds + 2) * self.input_bytes[b][a]

    def runs(self) -> list[tuple[int, int]]:
        """(first block, number of blocks) of each run of identical blocks."""
        found, at = [], 0
        for _, same in groupby(self.kinds):
            count = len(list(same))
            found.append((at, count))
            at += count
        return found

    def short_runs(self) -> list[tuple[int, int]]:
        """The same, but each block of a short run by itself."""
        parts = ([(at, size)] if size > SHORT else [(at + i, 1) for i in range(size)] for at, size in self.runs())
        return [part for some in parts for part in some]


def problem_of(draft: Draft, slices: Slices) -> MipProblem:
    """The problem of a draft on the devices in the order of `slices`.

    Raises `PlanError` naming the block whose measured time is zero, negative or not a number.
    """
    hardware, options, blocks = draft.lane_hardware, draft.options, draft.blocks
    devices, order = slices.devices, slices.order
    took = [[_seconds(block, device, options.precision) for block in blocks] for device in devices]
    params = [_trained_sizes(draft, block) for block in blocks]
    weights = _sums([block.param_bytes for block in blocks])
    cuts = range(len(blocks) + 1)
    work = [[n.work_bytes - (weights[b] - weights[a]) for a, n in enumerate(slices.needs[b])] for b in cuts]
    messages = MessageTimes(hardware)
    ways = [[messages.way(i, k) for k in order] for i in order]
    return MipProblem(
        names=tuple(block.name for block in blocks),
        kinds=_kinds(blocks),
        units=tuple(_unit(hardware, index, options.state_bytes_per_param) for index in order),
        micro_batches=options.micro_batches,
        forward_s=[_sums([s.forward_s for s in row]) for row in took],
        backward_s=[_sums([s.backward_s for s in row]) for row in took],
        again_s=[_sums([s.long_backward_s - s.backward_s for s in row]) for row in took],
        weight_bytes=weights,
        grad_bytes=_sums([size for _, size, _ in params]),
        params=_sums([count for count, _, _ in params]),
        tensors=_sums([tensors for _, _, tensors in params]),
        kept_bytes=_sums([block.cost.kept_bytes for block in blocks]),
        work_bytes=work,
        input_bytes=[[n.input_bytes for n in slices.needs[b]] for b in cuts],
        message_bytes=_messages(draft),
        message_s=[[1.0 / bandwidth for _, bandwidth in row] for row in ways],
        message_latency_s=[[latency_s for latency_s, _ in row] for row in ways],
        message_shares=[[_shares(hardware, i, k) for k in order] for i in order],
        update=_update(draft),
        ties=_ties(draft),
        order=tuple(order),
    )


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _seconds(block: Block, device: Device, precision: str) -> TurnSeconds:
    """The block's seconds. Measured ones are checked: no positive number would make every plan look alike. By the
    roofline a block without work, such as an `nn.Identity`, takes none."""
    took = block_seconds(block, device, precision)
    for what, seconds in (("forward", took.forward_s), ("backward", took.backward_s)):
        if device.name in block.seconds and not (math.isfinite(seconds) and seconds > 0):
            raise PlanError(
                f"block {block.name!r}: its {what} takes {seconds} s on {device.name}; a time is a positive number. "
                "Measure the block again, or take away its measured seconds, so that the roofline counts"
            )
    return took


def _kinds(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The kind of each block: equal hash, costs, parameter bytes and seconds; without a hash, each is its own kind."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for i, block in enumerate(blocks):
        seconds = repr(sorted(block.seconds.items()))
        key = (block.hash or i, block.cost, block.param_bytes, seconds)
        found.append(known.setdefault(key, len(known)))
    return tuple(found)


def _trained_sizes(draft: Draft, block: Block) -> tuple[float, float, float]:
    """Trained parameters of a block, the bytes of their gradients, and the number of its tensors."""
    graph = draft.graph
    held = {id(p): p for node in block.nodes for p in graph.node_parameters(node).values()}
    trained = [p for p in held.values() if p.requires_grad]
    size = sum(p.numel() * graph.gradient_dtype(p).itemsize for p in trained)
    return float(sum(p.numel() for p in trained)), float(size), float(len(held))


def _ties(draft: Draft) -> tuple[tuple[int, int, float], ...]:
    users: dict[int, tuple[int, int, float]] = {}
    for i, block in enumerate(draft.blocks):
        for node in block.nodes:
            for p in draft.graph.node_parameters(node).values():
                if p.requires_grad:
                    first = users.get(id(p), (i, i, 0.0))[0]
                    users[id(p)] = (first, i, float(p.numel() * draft.graph.gradient_dtype(p).itemsize))
    return tuple(row for row in users.values() if row[0] != row[1])


def _messages(draft: Draft) -> list[float]:
    """Per block the bytes that blocks before it hand on to it or past it, up to each value's first reader: a value goes
    from its maker to every later reader directly, long before that reader needs it."""
    blocks, narrow = draft.blocks, draft.graph.once(narrow_nodes)
    maker: dict[int, tuple[int, int]] = {}  # storage -> block, bytes
    found = [0.0] * (len(blocks) + 1)
    seen: set[int] = set()
    outputs: dict[fx.Node, int] = {}
    for i, block in enumerate(blocks):
        for node in block.inputs:
            if node in outputs:
                for key, size in _sent_bytes(draft, node, narrow).items():
                    if key in maker and key not in seen:
                        seen.add(key)
                        for p in range(maker[key][0] + 1, i + 1):
                            found[p] += size
        for node in block.outputs:
            outputs[node] = i
            maker.update({key: (i, size) for key, size in _sent_bytes(draft, node, narrow).items()})
    return found


def _sent_bytes(draft: Draft, node: fx.Node, narrow: frozenset[fx.Node]) -> dict[int, int]:
    """The storages of a value with their bytes between stages."""
    if node not in narrow:
        return storages([node])
    return dict.fromkeys(storages([node]), value_bytes(draft.graph, node, narrow))


def _shares(hardware: Hardware, src: int, dst: int) -> bool:
    """Whether root complexes carry a message between two devices."""
    path = hardware.path(hardware.devices[src].name, hardware.devices[dst].name)
    return any(link.startswith("rc") for link in path)


def _unit(hardware: Hardware, index: int, state_bytes_per_param: float) -> Unit:
    device = hardware.devices[index]
    dram = f"dram{device.host}"
    complex_ = hardware.hosts[device.host].root_complexes[device.root_complex]
    first = sum(len(host.root_complexes) for host in hardware.hosts[: device.host])
    return Unit(
        budget_bytes=device.budget_bytes,
        fetch_s=1.0 / hardware.bandwidth(dram, device.name),
        offload_s=1.0 / hardware.bandwidth(device.name, dram),
        shared_fetch_s=1.0 / complex_.bandwidth_down,
        shared_offload_s=1.0 / complex_.bandwidth_up,
        shared_both_s=0.0 if complex_.bandwidth_both is None else 1.0 / complex_.bandwidth_both,
        latency_s=device.link_latency_s,
        own_s=OWN_CALLS * device.op_overhead_s,
        step_s=update_traffic(1, state_bytes_per_param) / device.memory_bandwidth,
        call_s=device.op_overhead_s,
        byte_s=1.0 / device.memory_bandwidth,
        complex=first + device.root_complex,
        host=device.host,
    )


def _update(draft: Draft) -> UpdateCost:
    options, hosts = draft.options, draft.lane_hardware.hosts
    return UpdateCost(
        params_s=tuple(1.0 / host.optimizer_params_per_s for host in hosts),
        bytes_s=tuple(1.0 / host.dram_bandwidth for host in hosts),
        state_bytes=options.optimizer_bytes_per_param,
        barrier=Precision.of(options.precision).scales_loss or options.max_grad_norm is not None,
    )
