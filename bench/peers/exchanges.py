"""Exchanges of all GPUs of a host, by size, beside what the simulator counts with: gathers and sums, gathers by host as
if the GPUs were on two hosts, and messages of each pair. First the memory that communicators of NCCL take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock.bench.peers.gpu_setup import Row, Setup, note_call
from penstock.bench.peers.several_gpus import hardware_of, number_of_gpus, rows_of_ranks
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import MESSAGE_BLOCKS, NcclMemory, connections_of_group, ring_of
from penstock.runtime.simulate import CostModel
from penstock.runtime.simulate.collectives import rounds_of
from penstock.runtime.simulate.costs import URGENT
from penstock.runtime.simulate.sharing import Cost, alone_s

KIB, MIB = 2**10, 2**20
GATHERED_BYTES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)  # of the whole value
MESSAGE_BYTES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
GATHER, BY_HOST, SUM, MESSAGE = "gather", "gather by host", "reduce-scatter", "message"

MEMORY = {  # the figures of `communicator_bytes`
    "first": "for messages, at rest", "message": "the first message", "rest": "of a group, at rest",
    "gather": "its first gather", "sums": "its sums, after a gather",
}  # fmt: skip


def exchanges(setup: Setup) -> Iterator[Row]:
    """A row for each figure, with what the slowest of its ranks has of seconds, or each of its ranks of memory."""
    world = number_of_gpus(setup)
    if world < 2:
        yield note_call("exchanges of several GPUs", "this machine has one at most")
        return
    hardware = hardware_of(setup, world)
    hosts = [2 * device // world for device in range(world)] if world > 2 and world % 2 == 0 else []
    if not hosts:
        yield note_call("gathers by host", f"{world} GPUs are no two hosts of several")
    settings = {
        "path": str(setup.scratch / "exchanges"), "hosts": hosts,
        "gathered": GATHERED_BYTES[:2] if setup.small else GATHERED_BYTES,
        "messages": MESSAGE_BYTES[:2] if setup.small else MESSAGE_BYTES,
    }  # fmt: skip
    waiting: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows_of_ranks("exchange_ranks", settings, world):
        own = waiting[row["exchange"], tuple(row["members"]), row.get("bytes")]
        own.append(row)
        if len(own) == row["speakers"]:
            yield from rows_of_memory(own, hardware) if "taken" in row else [row_of_time(own, hardware, hosts)]


def row_of_time(ranks: list[Row], hardware: Hardware, hosts: list[int]) -> Row:
    exchange, members, num_bytes = (ranks[0][name] for name in ("exchange", "members", "bytes"))
    seconds = max(row["seconds"] for row in ranks)
    counted_s = predicted_s(exchange, members, num_bytes, hardware, hosts)
    return note_call(
        f"seconds of a {exchange}", seconds, members=members, bytes=num_bytes, bytes_per_s=num_bytes / seconds,
        predicted_s=counted_s, predicted_bytes_per_s=num_bytes / counted_s,
    )  # fmt: skip


def predicted_s(exchange: str, members: list[int], num_bytes: int, hardware: Hardware, hosts: list[int]) -> float:
    """The seconds that the simulator counts for an exchange alone on the machine."""
    model = CostModel(hardware, "fp32")
    if exchange == MESSAGE:
        source, target = members
        work = ops.Work(ops.SEND, moved_bytes=num_bytes, source=ops.DEVICE, target=f"{ops.DEVICE}{target}")
        return alone_s(model.transfer(source, work, URGENT), model.links)
    seats = Hardware.cpu(len(members), hosts=max(hosts) + 1) if exchange == BY_HOST else hardware
    memories, cost = {device: hardware.devices[device].name for device in members}, Cost()
    runs = rounds_of(members, seats, num_bytes, 1, hierarchical=exchange == BY_HOST)
    for number, rounds in enumerate(reversed(runs)):
        cost = model.rounds(rounds, memories, cost if number else None)
    return alone_s(cost, model.links)


def rows_of_memory(ranks: list[Row], hardware: Hardware) -> Iterator[Row]:
    """A row for each step of `communicators`, in which `measured` has a number of each of the members."""
    ranks = sorted(ranks, key=lambda row: row["rank"])
    members = ranks[0]["members"]
    counted = [counted_bytes(members, device, hardware) for device in members]
    for name, words in MEMORY.items():
        taken = [row["taken"].get(name, 0) for row in ranks]
        planned_bytes = [each[name] for each in counted]
        yield note_call(f"bytes of communicators: {words}", taken, members=members, planned_bytes=planned_bytes)


def counted_bytes(members: list[int], device: int, hardware: Hardware) -> dict[str, int]:
    """The bytes of a GPU that a plan counts for each step of `MEMORY`: NCCL adds up in a ring and a tree."""
    memory = NcclMemory(hardware, device)
    ring_bytes = sum(map(memory.group_bytes, ring_of(members, device)))
    pair = members[0], members[1]
    return {
        "first": memory.rest_bytes(1, 0), "message": memory.message_bytes(pair, MESSAGE_BLOCKS) * (device in pair),
        "rest": memory.rest_bytes(0, 1), "gather": ring_bytes,
        "sums": ring_bytes * (connections_of_group(len(members)) // 2 - 1),
    }  # fmt: skip
