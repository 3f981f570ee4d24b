"""The communicators of messages, their memory, and the order in which they run what they are given."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import (
    Interface,
    Program,
    communicators,
    gpu_connections,
    message_communicators,
    place_frees,
    reserve_communicators,
)
from penstock.ir.program.communicators import Communicator
from penstock.ir.verify.case import Case
from penstock.ir.verify.devices import check_deadlock
from penstock.tests.ir.program.handmade import linear_stages, pipeline

LINE = [pair for i in range(7) for pair in ((i, i + 1), (i + 1, i))]
PAIRS = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]))


@pytest.mark.parametrize(
    ("pairs", "most"),
    [
        (LINE, 2),
        ([*LINE, (7, 0), (0, 7)], 2),  # a ring
        ([(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)], 3),
        ([*LINE, *[(3, i) for i in (5, 6, 7)], *[(i, 3) for i in (5, 6, 7)]], 3),  # an encoder's output goes to all
        (list(permutations(range(8), 2)), 5),
        (list(permutations(range(70), 2)), 8),
    ],
)
def test_few_communicators_carry_all_messages(pairs: list[tuple[int, int]], most: int) -> None:
    found = message_communicators(pairs)
    devices = {device for pair in pairs for device in pair}
    assert max(sum(device in each.members for each in found) for device in devices) == most


@given(PAIRS)
@settings(deadline=None)
def test_no_device_sends_and_receives_in_one_communicator(pairs: set[tuple[int, int]]) -> None:
    found = message_communicators(pairs)
    assert sorted(pair for each in found for pair in each.pairs) == sorted(pairs)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert not {source for source, _ in each.pairs} & {target for _, target in each.pairs}
        assert set(each.members) == {device for pair in each.pairs for device in pair}


Messages = list[tuple[int, int]]  # source and destination
Orders = list[list[int]]  # per device, the numbers of its messages in text order
GPUS = Hardware.from_any("rtx4090x4")


def one_for_all(pairs: Collection[tuple[int, int]]) -> list[Communicator]:
    """The communicator that would be enough if nothing waited in one."""
    return [Communicator(tuple(sorted({device for pair in pairs for device in pair})), tuple(sorted(pairs)))]


def programs_of(messages: Messages, orders: Orders) -> list[Program]:
    """Programs that only exchange messages."""
    stages = linear_stages(len(orders), 32, 4, 1.0)
    interface = Interface(stages, pipeline(2, 2, 1)[0].interface.batch, num_devices=len(orders))
    programs = []
    for device, numbers in enumerate(orders):
        program = Program(device, interface)
        x = program.emit(ops.load, program.batch, "x", micro_batch=0, names=["x"])[0]
        for number in numbers:
            source, target = messages[number]
            if source == device:
                program.emit(ops.send, x, dst=target, tag=f"t{number}")
            else:
                program.emit(ops.recv, "stage0.h1", src=source, tag=f"t{number}", names=[f"y{number}"])
        place_frees(program)
        programs.append(program)
    return programs


def ends(messages: Messages, orders: Orders, shared: Sequence[Communicator]) -> bool:
    """True if all messages are delivered where each device runs its sends, its receives, and what it gives to each
    communicator one after another, and a message needs both sides."""
    carriers = {pair: each for each in shared for pair in each.pairs}
    left = [list(numbers) for numbers in orders]

    def is_next(device: int, number: int) -> bool:
        before = left[device][: left[device].index(number)]
        own = messages[number]
        return not any(messages[m][0] == own[0] or messages[m][1] == own[1] for m in before if device in own) and all(
            carriers[messages[m]] is not carriers[own] for m in before
        )

    while any(left):
        ready = {n for own in left for n in own if all(is_next(device, n) for device in messages[n])}
        if not ready:
            return False
        left = [[n for n in own if n not in ready] for own in left]
    return True


def verdict(messages: Messages, orders: Orders) -> bool:
    try:
        check_deadlock(Case(programs_of(messages, orders), GPUS))
    except VerifyError:
        return False
    return True


OTHERS = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda message: message[0] != message[1])


@pytest.mark.slow
@given(st.lists(OTHERS, max_size=6), st.randoms())
@settings(deadline=None, max_examples=60)
def test_what_the_verifier_passes_ends_in_the_order_of_each_communicator(
    messages: Messages, chance: random.Random
) -> None:
    orders = [[n for n, message in enumerate(messages) if device in message] for device in range(4)]
    for own in orders:
        if chance.random() < 0.5:
            chance.shuffle(own)
    apart = [Communicator(pair, (pair,)) for pair in set(messages)]
    found = ends(messages, orders, message_communicators(messages))
    assert found == ends(messages, orders, apart) == verdict(messages, orders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "message_communicators", one_for_all)
        assert verdict(messages, orders) == ends(messages, orders, one_for_all(messages))


def test_one_communicator_for_both_directions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device is ready to receive before it sends: right with a communicator for each direction."""
    programs = programs_of([(0, 1), (1, 0)], [[1, 0], [0, 1]])
    check_deadlock(Case(programs, GPUS))
    monkeypatch.setattr(communicators, "message_communicators", one_for_all)
    check_deadlock(Case(programs, Hardware.cpu(2)))  # gloo's messages have tags
    with pytest.raises(VerifyError) as caught:
        check_deadlock(Case(programs, GPUS))
    text = str(caught.value)
    assert "deadlock, 2 places wait in a ring" in text and "follows in the communicator messages/0-1,1-0" in text
    assert 'rt.send(x, dst=1, tag="t0")' in text and 'rt.recv("stage0.h1", src=1, tag="t1")' in text


MIB = 1 << 20
MEASURED = {
    "library_bytes": 70 * MIB, "rest_bytes": 9 * MIB, "sender_bytes": 16 * MIB, "receiver_bytes": 64 * MIB,
    "group_bytes": 100 * MIB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "measured", "rest_mib", "buffer_mib"),
    [
        ("rtx4090x4", None, 3 * 2 * (2 + 3 * 2), 0),  # without P2P the buffers are in DRAM
        # In the middle of a line, and in a ring and a tree.
        ("a100-80gbx4", None, 2 * 2 * (2 + 3 * 16) + 2 * (2 + 3 * 32), 2 * 16 * 12 + 32 * 24),
        ("a100-80gbx4", MEASURED, 70 + 3 * 9, 2 * (16 + 64) + 4 * 100),
        ("rtx4090x4", MEASURED, 70 + 3 * 9, 2 * (16 + 64) + 4 * 100),
    ],
)
def test_what_the_communicators_of_a_gpu_take(
    machine: str, measured: dict[str, int] | None, rest_mib: int, buffer_mib: int
) -> None:
    programs = pipeline(4, 4, 2, clip=True, fetched=False)
    found = gpu_connections(programs, Hardware.from_any(machine).with_(communicators=measured))
    assert [(each.messages, each.groups, each.connections) for each in found.values()] == [
        (2, 1, 6), (2, 1, 8), (2, 1, 8), (2, 1, 6)
    ]  # fmt: skip
    assert (found[1].rest_bytes, found[1].buffer_bytes) == (rest_mib * MIB, buffer_mib * MIB)
    assert found[1].measured == (measured is not None) and found[1].num_bytes == (rest_mib + buffer_mib) * MIB
    assert not gpu_connections(programs, Hardware.cpu(4))


def test_the_reserve_of_a_gpu_has_room_for_its_communicators() -> None:
    programs = pipeline(4, 4, 2, clip=True, fetched=False)
    hardware = Hardware.from_any("a100-80gbx4").with_(communicators=MEASURED)
    reserved = reserve_communicators(programs, hardware)
    taken = gpu_connections(programs, hardware)
    assert [d.reserve.messages_bytes for d in reserved.devices if d.reserve] == [t.num_bytes for t in taken.values()]
    assert reserve_communicators(programs, reserved) is reserved
    part = hardware.with_(memory="40GB")  # whose rest has the reserve
    assert reserve_communicators(programs, part) is part
    for enough in (Hardware.from_any("rtx4090x4"), Hardware.from_any("rtx4090x1"), Hardware.cpu(4)):
        assert reserve_communicators(programs if enough.num_devices > 1 else programs[:1], enough) is enough
