"""Rules about all devices together: messages and collectives match, nobody waits in a ring, memories suffice."""

from __future__ import annotations

import itertools

from torch import fx

from .. import ops
from ..calls import op_of
from ..errors import VerifyError
from ..program import (
    MemoryProfile,
    Order,
    Program,
    add_communicator_waits,
    add_host_waits,
    budget_excess_text,
    build_order,
    describe,
    find_cycle,
    operands,
    print_node,
    values_of,
)
from .case import Case, fail, line_of, message_key, where

OpCall = tuple[Program, fx.Node]


def check_devices(case: Case) -> None:
    """One program per device of one plan, and a machine with that many devices."""
    first = case.programs[0]
    last = first.interface.num_devices - 1
    if [p.device for p in case.programs] != list(range(last + 1)):
        found = ", ".join(str(p.device) for p in case.programs)
        raise VerifyError(f"expected programs for devices 0 to {last} in order, found {found}")
    for program in case.programs:
        if program.function != first.function:
            message = f"device {program.device} has `{program.function}`, device 0 has `{first.function}`"
            raise VerifyError(message, device=program.device)
        if program.interface is not first.interface and program.interface != first.interface:
            raise VerifyError(f"device {program.device} is of another plan than device 0", device=program.device)
    if case.hardware is not None and len(case.hardware.devices) < len(case.programs):
        raise VerifyError(f"{len(case.programs)} programs, but the hardware has {len(case.hardware.devices)} devices")


def check_messages(case: Case) -> None:
    """Sends and receives match one to one by (source, destination, tag), with equal shape and dtype."""
    sends: dict[tuple[int, int, str], OpCall] = {}
    recvs: dict[tuple[int, int, str], OpCall] = {}
    for program in case.programs:
        for node in program.ops():
            if op_of(node).meets != ops.PEER:
                continue
            key, side = message_key(program, node), sends if node.target is ops.send else recvs
            if key in side:
                earlier = line_of(*side[key])
                fail(program, node, f"tag {key[2]!r} is used again between the same devices, first in line {earlier}")
            side[key] = (program, node)
    for key, (program, node) in sends.items():
        if key not in recvs:
            fail(program, node, f"device {key[1]} never receives {key[2]!r} from device {key[0]}")
    for key, (program, node) in recvs.items():
        if key not in sends:
            fail(program, node, f"device {key[0]} never sends {key[2]!r} to device {key[1]}")
        _check_equal_types(sends[key], (program, node))


def _check_equal_types(send: OpCall, recv: OpCall) -> None:
    sent: ops.Value = operands(send[1])[0].meta["type"]
    received: ops.Value = recv[1].meta["type"]
    if (sent.shape, sent.dtype) != (received.shape, received.dtype):
        message = f"expects {describe(received)}, but {describe(sent)} is sent by {where(*send)}"
        fail(*recv, message)


def check_collectives(case: Case) -> None:
    """All members of a group call it equally often, each time with the same op and kind of value, and with the same
    stage unless the group names parameters."""
    calls: dict[str, dict[int, list[OpCall]]] = {}
    groups = case.programs[0].interface.groups
    for program in case.programs:
        for node in program.ops():
            if op_of(node).meets != ops.GROUP:
                continue
            group = str(node.kwargs["group"])
            if group not in groups:  # it joins lanes, which all do the same
                continue
            calls.setdefault(group, {}).setdefault(program.device, []).append((program, node))
    for group, by_device in calls.items():
        members = sorted({device for device, _, _ in groups[group]})
        most = max(by_device.values(), key=len)
        for device in members:
            own = by_device.get(device, [])
            if len(own) < len(most):
                message = f"device {device} calls group {group!r} {len(own)} times, this device {len(most)} times"
                fail(*most[len(own)], message)
            for mine, other in zip(own, most):
                kinds = [_meeting(*call) for call in (mine, other)]
                if kinds[0] != kinds[1]:
                    fail(*mine, f"group {group!r} meets {kinds[0]} here and {kinds[1]} in {where(*other)}")


def _meeting(program: Program, node: fx.Node) -> str:
    """The values that all members must bring to a collective: "grads of stage1 to reduce_scatter"."""
    value: ops.Value = operands(node)[0].meta["type"]
    rows = program.interface.groups[str(node.kwargs["group"])]
    whole = value.stage and not any(param for _, _, param in rows)
    return f"{value.kind}{f' of {value.stage}' if whole else ''} to {op_of(node).name}"


def check_deadlock(case: Case) -> None:
    """Every op can start: no ring of ops that wait for each other over operands, streams, messages, memory, and of GPUs
    communicators and the hosts that issue their ops."""
    order = build_order(case.programs, case.memories)
    if case.hardware is not None:
        owners = {program.device: case.hardware.devices[program.device] for program in case.programs}
        gpus = [device for device, owner in owners.items() if owner.kind == "cuda"]
        add_communicator_waits(order, case.programs, gpus)
        add_host_waits(order, case.programs, gpus)
    fail_on_ring(case, order)


def fail_on_ring(case: Case, order: Order) -> None:
    """Raise `VerifyError` where tasks of an order of these programs wait for each other in a ring."""
    ring = find_cycle(order)
    if ring is None:
        return
    lines = []
    for index, why in ring:
        both = " and ".join(where(case.program_of[device], node) for device, node, _ in order.tasks[index].parts)
        lines.append(f"    {both}\n        waits: {why}, so for")
    device, node, _ = order.tasks[ring[0][0]].parts[0]
    chain = "\n".join([f"deadlock, {len(ring)} places wait in a ring:", *lines, "    the first one again\n"])
    fail(case.program_of[device], node, chain)


def check_device_memory(case: Case) -> None:
    """At every op, each device's memory holds the live values of its program."""
    if case.hardware is None:
        return
    for program in case.programs:
        device, profile = case.hardware.devices[program.device], case.profiles[program.device]
        if profile.peak_bytes[ops.DEVICE] > device.budget_bytes:
            _fail_memory(program, profile, ops.DEVICE, device.name, device.budget_bytes, {})


def check_host_memory(case: Case) -> None:
    """Each host's DRAM, and its SSDs, hold the sum of what its devices' programs need at their peaks."""
    if case.hardware is None:
        return
    for host, memory in itertools.product(range(len(case.hardware.hosts)), (ops.DRAM, ops.SSD)):
        own = [p for p in case.programs if case.hardware.devices[p.device].host == host]
        peaks = {p.device: case.profiles[p.device].peak_bytes[memory] for p in own}
        there = memory == ops.DRAM or case.hardware.hosts[host].ssds
        budget_bytes = case.hardware.budget_bytes(f"{memory}{host}") if there else 0
        if sum(peaks.values()) <= budget_bytes:
            continue
        program = max(own, key=lambda p: peaks[p.device])
        others = {f"device {device}, all": peak for device, peak in peaks.items() if device != program.device}
        _fail_memory(program, case.profiles[program.device], memory, f"{memory}{host}", budget_bytes, others)


def _fail_memory(
    program: Program, profile: MemoryProfile, memory: str, name: str, budget_bytes: int, others: dict[str, int]
) -> None:
    node = profile.peak_at[memory]
    held = {f"{part}, kept across steps": size for part, size in profile.persistent.parts(memory).items() if size}
    if profile.arenas[memory]:
        held["arena of fetched weights" if memory == ops.DEVICE else "arena"] = profile.arenas[memory]
    held = {**held, **others, **profile.live_values[memory]}
    made = [value.name for value in values_of(node)] if node is not None else []
    live = {value: size for value, size in held.items() if value not in made}
    need_bytes = profile.peak_bytes[memory] + sum(others.values()) - sum(live.values())
    what = ", ".join(made) or "this op"
    if node is None:  # what persists and the arena are too much already
        message = budget_excess_text(name, budget_bytes, need_bytes, "the step", "", live)
        raise VerifyError(message, device=program.device)
    fail(program, node, budget_excess_text(name, budget_bytes, need_bytes, what, print_node(node) or "", live) + "\n")
