"""The connections of devices: sends, receives and sums on torch.distributed, gloo for host memory, NCCL between GPUs.

A communicator of NCCL takes memory of the GPU, more for each peer that it is used with, and it takes that when it is
first used so: the host then waits until the peer does the same, and the GPU until all its kernels are over. All that
the programs will use is used once here, while nothing is under way.

Backends are made directly from a store, so the process's own default group is neither needed nor touched. Host traffic
blocks the calling thread (one thread per stream); NCCL traffic is enqueued on the current CUDA stream. On gloo, a peer
that dies raises an error at once, and a silent one after `timeout_s`; on NCCL neither does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils.dlpack import from_dlpack, to_dlpack

from ...ir import ops
from ...ir.calls import op_of
from ...ir.errors import PlanError
from ...ir.program import MESSAGE_BLOCKS, Program, message_communicators, pair_of, seats_of, work_of
from ..accelerator import give_back, require_free_launches, settle
from ..torch_names import gloo_options
from .exchange import gather_rows, pass_on, sum_rows, trade_counted, trade_rows

LOOPBACK = "127.0.0.1"
# NCCL would count from when a message is issued, and a receive may be issued a step early. Whoever runs the devices
# looks after them.
NEVER = timedelta(seconds=1e7)
# torch tells whoever sends through the communicator of a group that its messages wait for each other, as is meant here.
SERIAL_SETTING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
SUM = "sum"  # patterns of groups, beside `ops.PAIRS` and `ops.RING_STEP`
GATHER = "gather"
SCATTER = "scatter"
INTERFACE_SETTING = "GLOO_SOCKET_IFNAME"  # as torch.distributed's own gloo


class Use(NamedTuple):
    """An operation of programs in a group of GPUs, with the bytes of the whole value. `flag`: of a gather whether it is
    hierarchical, of a step round the ring whether it goes back."""

    pattern: str
    num_bytes: int
    flag: bool = False


class PeerLink:
    """One device's end of all connections.

    `groups`: per name, the devices that take part, in the order in which their parts are added. `hosts`: the host of
    each device, or empty if all are on one. `hostname` binds gloo to one address; None binds it to the interface that
    GLOO_SOCKET_IFNAME names, else to this host's own.
    """

    def __init__(
        self,
        store: dist.Store,
        device_index: int,
        num_devices: int,
        groups: Mapping[str, Sequence[int]],
        device: torch.device,
        *,
        timeout_s: float = 600.0,
        hostname: str | None = None,
        hosts: Sequence[int] = (),
    ):
        self.index = device_index
        self.device = device
        self.groups = {name: list(members) for name, members in groups.items() if device_index in members}
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._hostname = hostname
        self._everyone = self._gloo("messages", device_index, num_devices)
        self._gloo_groups: dict[str, Any] = {}
        self._nccl_groups: dict[str, Any] = {}
        self._nccl_sets: dict[tuple[int, ...], Any] = {}  # by the members: groups of the same ones share one
        self._inside: dict[str, Any] = {}  # by group: the communicator of this host's members, for hierarchical gathers
        self._num_devices = num_devices
        self._routes: dict[tuple[int, int], tuple[Any, int]] = {}  # of messages: communicator, and the peer's rank
        self._tags: dict[tuple[int, int], dict[str, int]] = {}
        self._single = {name for name, members in self.groups.items() if len(members) == 1}
        self._seats = {
            name: seats_of([hosts[device] if hosts else 0 for device in members], members.index(device_index))
            for name, members in self.groups.items()
        }

    def connect(
        self,
        orders: Mapping[tuple[int, int], Sequence[str]],
        group_memories: Mapping[str, str],
        uses: Mapping[str, Sequence[Use]] = MappingProxyType({}),
    ) -> None:
        """Make every connection that the programs need.

        `orders`: see `message_orders`. `group_memories`: per group, the memory of this device's part. NCCL
        sums a group whose parts are all in GPUs, gloo any other. `uses`: see `group_uses`. Raises `PlanError` if two
        GPUs would exchange messages in different orders, which NCCL cannot do.
        """
        self._tags = {pair: {tag: i for i, tag in enumerate(sorted(set(tags)))} for pair, tags in orders.items()}
        on_gpu = self.device.type == "cuda"
        self._store.set(f"pairs/{self.index}", json.dumps(sorted(orders) if on_gpu else []))
        if on_gpu and orders:
            self._connect_messages(orders)
        for name, memory in sorted(group_memories.items()):
            if name not in self._single:
                self._connect_group(name, self.groups[name], memory)
                if name in self._nccl_groups:
                    if any(use.pattern == GATHER and use.flag for use in uses.get(name, ())):
                        self._connect_inside(name)
                    self._use_once(name, uses.get(name, ()))
        if on_gpu:
            give_back(self.device)

    def _connect_messages(self, orders: Mapping[tuple[int, int], Sequence[str]]) -> None:
        """All devices walk over communicators and pairs in the same order, since both sides of a first message block
        until the other side is there."""
        require_free_launches()
        rows = [json.loads(self._store.get(f"pairs/{device}")) for device in range(self._num_devices)]
        for each in message_communicators({(source, target) for row in rows for source, target in row}):
            if self.index not in each.members:
                continue
            group = self._nccl(each.name, each.members, MESSAGE_BLOCKS)
            for source, target in each.pairs:
                if self.index in (source, target):
                    peer = target if self.index == source else source
                    self._routes[source, target] = group, each.members.index(peer)
        first = torch.zeros(1, device=self.device)
        for (source, target), tags in sorted(orders.items()):
            self._agree_on_order(source, target, tags)
            if self.index == source:
                self.send(first, target, tags[0])
            else:
                self.recv(first, source, tags[0])
            settle(self.device)

    def _connect_group(self, name: str, members: list[int], memory: str) -> None:
        rank = members.index(self.index)
        self._gloo_groups[name] = self._gloo(f"gloo/{name}", rank, len(members))
        mine = f"{self.device.type} {memory}"
        self._store.set(f"memory/{name}/{self.index}", mine)
        found = {self._store.get(f"memory/{name}/{member}").decode() for member in members}
        if found == {"cuda device"}:
            key = tuple(members)
            if key not in self._nccl_sets:
                self._nccl_sets[key] = self._nccl(f"group/{name}", key)
            self._nccl_groups[name] = self._nccl_sets[key]

    def _connect_inside(self, name: str) -> None:
        """No other group shares this communicator, so that it runs its gathers in the order of the group's."""
        if self._seats[name].hosts and self._seats[name].contiguous:
            members = [self.groups[name][seat] for seat in self._seats[name].here]
            self._inside[name] = self._nccl(f"inside/{name}/{members[0]}", members)

    def _use_once(self, name: str, uses: Sequence[Use]) -> None:
        """Do what the programs will do in a group, each at its size, by which NCCL chooses an algorithm, and with it
        connections."""
        count = len(self.groups[name])
        for use in (Use(SUM, 4 * count), Use(GATHER, 4 * count), *sorted(set(uses))):
            settle(self.device)
            rows = torch.zeros(count, max(1, use.num_bytes // (4 * count)), device=self.device)
            if use.pattern == ops.RING_STEP:
                self.pass_on(rows[0], name, use.flag)
            elif use.pattern == ops.PAIRS:
                self.exchange_rows(rows[:, :1].contiguous(), name)
            elif use.pattern == GATHER:
                self.gather_rows(rows, name, use.flag)
            elif use.pattern == SCATTER:
                self.sum_rows(rows, torch.empty_like(rows[0]), None, name)
            else:
                self.sum_all([rows.view(-1)], name)

    def _agree_on_order(self, src: int, dst: int, tags: Sequence[str]) -> None:
        self._store.set(f"order/{src}-{dst}/{self.index}", json.dumps(list(tags)))
        other = src if self.index == dst else dst
        theirs = json.loads(self._store.get(f"order/{src}-{dst}/{other}"))
        if theirs != list(tags):
            first = next((a, b) for a, b in zip([*tags, "none"], [*theirs, "none"]) if a != b)
            raise PlanError(
                f"messages from device {src} to device {dst} are sent and received in different orders ({first[0]!r} "
                f"on device {self.index}, {first[1]!r} on device {other}); on GPUs the orders must be the same"
            )

    # --- messages

    def send(self, value: Tensor, dst: int, tag: str) -> None:
        """Deliver to `dst`, which must receive under the same tag."""
        if value.is_cuda:
            group, rank = self._routes[self.index, dst]
            group.send([_alias(value)], rank, 0).wait()
        else:
            self._everyone.send([value], dst, self._tags[self.index, dst][tag]).wait()

    def recv(self, into: Tensor, src: int, tag: str) -> None:
        """Fill `into` (contiguous) with what `src` sends under this tag."""
        if into.is_cuda:
            group, rank = self._routes[src, self.index]
            group.recv([_alias(into)], rank, 0).wait()
        else:
            self._everyone.recv([into], src, self._tags[src, self.index][tag]).wait()

    def meet_receiver(self, dst: int, tag: str) -> None:
        """Wait until `dst` is at the receive of this tag, without handing over anything. Host memory only."""
        self._everyone.send([torch.zeros(1, dtype=torch.uint8)], dst, self._tags[self.index, dst][tag]).wait()

    def meet_sender(self, src: int, tag: str) -> None:
        """The other side of `meet_receiver`."""
        self._everyone.recv([torch.zeros(1, dtype=torch.uint8)], src, self._tags[src, self.index][tag]).wait()

    def meet_all(self, group: str) -> None:
        """Wait until all members of the group are here. Host memory only."""
        if group not in self._single:
            self._gloo_groups[group].barrier().wait()

    # --- collectives

    def on_device(self, group: str) -> bool:
        """Whether the group's sums run on the GPU (else the caller's thread blocks, with values in host memory)."""
        return group in self._nccl_groups or (group in self._single and self.device.type == "cuda")

    def sum(self, value: Tensor, group: str) -> None:
        """Replace `value` (contiguous) by the sum over the group's devices: the same bits on all of them."""
        if group not in self._single:
            groups = self._nccl_groups if value.is_cuda else self._gloo_groups
            groups[group].allreduce([value], dist.AllreduceOptions()).wait()

    def gather(self, value: Tensor, group: str) -> list[Tensor]:
        """Every device's value, in the group's order."""
        if group in self._single:
            return [value]
        groups = self._nccl_groups if value.is_cuda else self._gloo_groups
        found = [torch.empty_like(value) for _ in self.groups[group]]
        groups[group].allgather([found], [value]).wait()
        return found

    def sum_all(self, values: Sequence[Tensor], group: str) -> None:
        """As `sum`, for several values (contiguous, of one dtype) at once."""
        if group not in self._single:
            groups = self._nccl_groups if values[0].is_cuda else self._gloo_groups
            groups[group].allreduce_coalesced(list(values), dist.AllreduceCoalescedOptions()).wait()

    def gather_rows(self, rows: Tensor, group: str, hierarchical: bool = False) -> None:
        """Fill `rows` (members, n), of which only this device's own is filled so far, with the rows of all devices in
        the group's order. `hierarchical`: first between hosts, then inside them."""
        if group not in self._single:
            groups = self._nccl_groups if rows.is_cuda else self._gloo_groups
            gather_rows(groups[group], self._seats[group], rows, hierarchical, self._inside.get(group))

    def sum_rows(
        self, rows: Tensor, spare: Tensor, into: Tensor | None, group: str, hierarchical: bool = False,
        whole: bool = False,
    ) -> Tensor:  # fmt: skip
        """The sum over the group's devices of this device's row, out of `rows` (members, n), in `into` (n) if that is
        given. The rows and `spare` (n) are used up. `hierarchical`: in host memory, first inside hosts, then between
        them. `whole`: every device receives all sums, as in an all-reduce."""
        if group in self._single:
            return rows[0] if into is None else into.copy_(rows[0])
        groups = self._nccl_groups if rows.is_cuda else self._gloo_groups
        total = sum_rows(groups[group], rows, spare, into, self._seats[group], hierarchical)
        if whole:
            rows[self._seats[group].index].copy_(total)
            gather_rows(groups[group], self._seats[group], rows, hierarchical)
        return total

    def exchange_rows(self, rows: Tensor, group: str) -> Tensor:
        """Of every member, in the group's order, the row that it has for this device: `rows` (members, n, ...) has this
        device's rows for the members."""
        if group in self._single:
            return rows
        groups = self._nccl_groups if rows.is_cuda else self._gloo_groups
        return trade_rows(groups[group], self._seats[group].index, rows)

    def exchange_counted(
        self, rows: Tensor, given: Sequence[int], found: Tensor, taken: Sequence[int], group: str
    ) -> None:
        """Fill `found` (contiguous) with the rows that every member has for this device, in the group's order. `rows`
        (contiguous) has this device's rows for the members; `given` and `taken` say how many go to and come of each."""
        if group in self._single:
            found.copy_(rows)
            return
        groups = self._nccl_groups if rows.is_cuda else self._gloo_groups
        trade_counted(groups[group], self._seats[group].index, rows, given, found, taken)

    def pass_on(self, value: Tensor, group: str, back: bool = False) -> Tensor:
        """The value (contiguous) of the member before this device in the group's ring; with `back`, of the one after
        it. This device's own goes the same way."""
        if group in self._single:
            return value
        groups = self._nccl_groups if value.is_cuda else self._gloo_groups
        seats = self._seats[group]
        return pass_on(groups[group], seats.index, len(seats.ring), value, back)

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """Overwrite `value` on all other devices with that of the device `source`, and return it. Host memory only."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._everyone.broadcast([value], options).wait()
        return value

    # --- backends

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options: Any = gloo_options()
        where = {"interface": os.environ[INTERFACE_SETTING]} if INTERFACE_SETTING in os.environ else {}
        if self._hostname is not None:
            where = {"hostname": self._hostname}
        make = dist.ProcessGroupGloo.create_device if where else dist.ProcessGroupGloo.create_default_device
        options._devices = [make(**where)]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, options)

    def _nccl(self, name: str, members: Sequence[int], most_blocks: int | None = None) -> Any:
        """A communicator of these devices, which all must make it now."""
        store, rank = dist.PrefixStore(f"nccl/{name}", self._store), list(members).index(self.index)
        return nccl_communicator(store, rank, len(members), self.device, most_blocks)


def nccl_communicator(
    store: dist.Store, rank: int, count: int, device: torch.device, most_blocks: int | None = None
) -> Any:
    """A communicator of `count` GPUs, without connections. All of them must make it now, from a store of its own.
    `most_blocks`: of each of its kernels."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # a message goes before computation
    options._timeout = NEVER
    if most_blocks is not None:
        options.config.max_ctas = most_blocks
    os.environ.setdefault(SERIAL_SETTING, "false")
    group = dist.ProcessGroupNCCL(store, rank, count, options)
    group.eager_connect_single_device(device)  # else each pair that sends would get another communicator
    return group


def _alias(value: Tensor) -> Tensor:
    """The same memory as a tensor that torch's allocator does not know. NCCL's backend would else have the memory
    recorded as used on its own stream, and given back only once the host has seen that stream past it. The caller's
    stream waits for NCCL's, and `Loans` hold the memory for the caller's stream."""
    return from_dlpack(to_dlpack(value))


def message_orders(programs: Sequence[Program]) -> dict[tuple[int, int], list[str]]:
    """The tags in text order, over all programs, per pair (source, destination) that the programs' device is in."""
    orders: dict[tuple[int, int], list[str]] = {}
    for program in programs:
        for node in program.ops():
            if op_of(node).meets == ops.PEER:
                work = work_of(program, node)
                orders.setdefault(pair_of(program.device, node, work.peer), []).append(work.tag)
    return orders


def group_memories(programs: Sequence[Program]) -> dict[str, str]:
    """Per group in which the programs meet, the memory of the values."""
    found: dict[str, str] = {}
    for program in programs:
        for node in program.ops():
            if op_of(node).meets == ops.GROUP:
                work = work_of(program, node)
                found[work.group] = ops.DRAM if ops.DRAM in (work.source, found.get(work.group)) else ops.DEVICE
    return found


def group_members(groups: Mapping[str, Sequence[tuple[int, str, str]]]) -> dict[str, list[int]]:
    """Per group its devices, each once, in the order of the members."""
    return {name: list(dict.fromkeys(device for device, _, _ in rows)) for name, rows in groups.items()}


def group_uses(programs: Sequence[Program]) -> dict[str, list[Use]]:
    """Per group in which the programs meet, what they do there."""
    found: dict[str, list[Use]] = {}
    for program in programs:
        for node in program.ops():
            if op_of(node).meets == ops.GROUP:
                work = work_of(program, node)
                found.setdefault(work.group, []).extend(_uses_of(node, work))
    return found


def _uses_of(node: fx.Node, work: ops.Work) -> list[Use]:
    gather = Use(GATHER, work.moved_bytes, work.hierarchical)
    if work.pattern:
        return [Use(work.pattern, 0, bool(node.kwargs.get("back")))]
    if node.target in (ops.all_gather, ops.gather_parts):
        return [gather]
    if node.target in (ops.reduce_scatter, ops.scatter_sum):
        return [Use(SCATTER, work.moved_bytes), *([gather] if node.kwargs.get("whole") else [])]
    return [Use(SUM, work.moved_bytes)]
