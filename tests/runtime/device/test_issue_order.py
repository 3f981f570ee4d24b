"""Hosts that issue ahead of their GPUs, streams, messages and the memory of each stream, in any interleaving: nobody
waits for ever, and no stream takes more memory than its share. A model of the device runtime, with its own waits and
loans."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

from penstock.ir import ops
from penstock.ir.calls import op_of
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import (
    Program,
    add_host_waits,
    build_order,
    donated_operands,
    find_cycle,
    operands,
    place_frees,
    places_of,
    pools_of,
    producer_of,
    profile_memory,
    values_of,
)
from penstock.ir.verify import verify
from penstock.runtime.device.issuing import Box, Loans, storages_in
from penstock.runtime.device.prepare import Issue, plan_issues
from penstock.runtime.device.streams import HostEvent, Stream
from penstock.tests.ir.program.handmade import pipeline

THREADS = (ops.CPU, ops.READ, ops.WRITE)


class Model:
    """One device: its host, which issues steps in text order, and its streams. `taken`: bytes per pool, as torch's
    allocator has them while the host runs ahead. Op i of the N of step k is named by the number k * N + i."""

    def __init__(self, program: Program, budget_bytes: int, pooled: bool = True, steps: int = 1):
        self.program, self.nodes, self.steps = program, list(program.ops()), steps
        self.plan = plan_issues(program, budget_bytes, pooled=pooled)
        self.issues, self.per_step = self.plan.ops, len(self.plan.ops)
        self.streams = {issue.stream: Stream(issue.stream) for issue in self.issues}
        self.queues: dict[str, deque[int]] = {name: deque() for name in self.streams}
        self.done: set[int] = set()
        self.cursor = 0
        self.losses = {issue.index for issue in self.issues if issue.losses and issue.op == "forward"}
        self.judging = next((issue.index for issue in self.issues if issue.judges), None)
        self.looked = -1  # the last step whose losses the host has seen
        self.all = [self]  # of all devices
        self.loans = Loans()
        self.boxes: dict[fx.Node, Box] = {}
        self.taken: Counter[str] = Counter()
        self.shares = shares_of(program, budget_bytes)
        self.most: Counter[str] = Counter()

    @property
    def finished(self) -> bool:
        return self.cursor == self.steps * self.per_step and not any(self.queues.values())

    def issue_of(self, number: int) -> Issue:
        return self.issues[number % self.per_step]

    def waits(self, number: int) -> list[int]:
        issue, first = self.issue_of(number), number - number % self.per_step
        before = [first - self.per_step + i for i in issue.before if first]
        return [first + i for i in issue.waits] + before

    def issue(self) -> bool:
        """Let the host go on by one op. Whether it could."""
        if self.cursor == self.steps * self.per_step:
            return False
        if self.cursor % self.per_step == 0 and not self.begin():
            return False
        if not self.look():
            return False
        issue = self.issue_of(self.cursor)
        node = self.nodes[issue.index]
        if issue.op == "step" and issue.stream not in THREADS and not self.has_verdict(self.cursor):
            return False
        if op_of(node).streams:
            waits = self.waits(self.cursor) if issue.stream not in THREADS else []
            if {i for i in waits if self.issue_of(i).stream in THREADS} - self.done:
                return False
            self.memory(node)
            self.queues[issue.stream].append(self.cursor)
        for value in operands(node) if node.target is ops.free else donated_operands(node):
            self.boxes.pop(value, None)
        self.cursor += 1
        return True

    def look(self) -> bool:
        """After the op that its plan says, the host waits for the losses of its device. Whether it need not."""
        step, index = divmod(self.cursor - 1, self.per_step)
        if index != self.judging or self.looked == step:
            return True
        if self.done.issuperset(step * self.per_step + i for i in self.losses):
            self.looked = step
        return self.looked == step

    def has_verdict(self, number: int) -> bool:
        """Whether all hosts have seen the losses of an op's step: only then an update is issued, or begins on a
        thread."""
        return all(model.looked >= number // self.per_step for model in self.all if model.judging is not None)

    def begin(self) -> bool:
        """What the host waits for between two steps, in `DeviceSession.begin_step`: results and forwards of the step
        before, and the end of the one before that. Whether it need not."""
        before = self.cursor - self.per_step
        if before >= 0:
            results = [v for values in self.program.results().values() for v in values]
            made = [self.nodes.index(producer_of(value)) for value in results]
            wanted = {before + i for i in (*made, *self.plan.forwards) if op_of(self.nodes[i]).streams}
            if not self.done.issuperset(wanted) or any(row and row[0] < before for row in self.queues.values()):
                return False
            self.boxes.clear()
            self.loans.end(before)
        self.loans.begin(self.per_step)
        return True

    def memory(self, node: fx.Node) -> None:
        """The accounting of `Issuing._launch` for boxes."""
        issue = self.issue_of(self.cursor)
        stream = self.streams[issue.stream]
        waits = [HostEvent(self.streams[self.issue_of(i).stream]) for i in self.waits(self.cursor)]
        for event, number in zip(waits, self.waits(self.cursor)):
            event.number = number
        self.loans.settle(stream, waits)
        for value in operands(node):
            if value in self.boxes:
                self.loans.lend(self.boxes[value], stream, self.cursor)
        foreign = [self.boxes[v] for v in operands(node) if v in self.boxes and self.boxes[v].stream is not stream]
        made = {(v.meta["type"].kind, v.meta["type"].stage) for v in values_of(node)}
        olds = {(v.meta["type"].kind, v.meta["type"].stage): self.boxes.pop(v, None) for v in donated_operands(node)}
        olds = {key: box for key, box in olds.items() if key in made}
        for value in values_of(node):
            kind = value.meta["type"]
            if kind.memory != ops.DEVICE or not kind.owned or places_of(value):
                continue
            box, old = Box(stream), olds.pop((kind.kind, kind.stage), None)
            if old is not None:
                box.value = old.value
                box.inherit(old, storages_in(old.value))  # in place: nothing in it is of the maker's memory
            else:
                box.value = torch.empty(kind.bytes, dtype=torch.uint8)
                self.taken[issue.stream] += kind.bytes
                weakref.finalize(box.value, self.taken.subtract, {issue.stream: kind.bytes})
            if kind.kind == "rest":
                for read in foreign:
                    box.keep(read)
            self.boxes[value] = box
        self.most[issue.stream] = max(self.most[issue.stream], self.taken[issue.stream] + issue.workspace_bytes)

    def heads(self) -> list[int]:
        """The ops at the front of their streams whose waits are over."""
        rows = [row[0] for row in self.queues.values() if row]
        rows = [index for index in rows if self.issue_of(index).op != "step" or self.has_verdict(index)]
        return [index for index in rows if self.done.issuperset(self.waits(index))]

    def end(self, index: int) -> None:
        self.queues[self.issue_of(index).stream].popleft()
        self.done.add(index)


def shares_of(program: Program, budget_bytes: int) -> dict[str, int]:
    profile = profile_memory(program)
    lasting_bytes = profile.persistent.total(ops.DEVICE) + profile.arena_bytes
    return pools_of(program).shares(budget_bytes - lasting_bytes)


def meeting(model: Model, index: int) -> Any:
    issue = model.issue_of(index)
    if issue.op == "send":
        return model.program.device, issue.peer, issue.tag
    if issue.op == "recv":
        return issue.peer, model.program.device, issue.tag
    return issue.group or None


def run(models: list[Model], random: Random, ahead: bool) -> None:
    """`ahead`: hosts issue whatever they can before any stream goes on."""
    for model in models:
        model.all = models
    while not all(model.finished for model in models):
        moved = False
        for model in random.sample(models, len(models)):
            while model.issue():
                moved = True
                if not ahead and random.random() < 0.5:
                    break
        together: dict[Any, list[tuple[Model, int]]] = {}
        for model in models:
            for index in model.heads():
                key = meeting(model, index) or (model.program.device, index)
                together.setdefault(key, []).append((model, index))
        for key in random.sample(list(together), len(together)):
            if len(together[key]) < (len(models) if isinstance(key, str) else len(key) - 1 if len(key) == 3 else 1):
                continue
            for model, index in together[key]:
                model.end(index)
            moved = True
            if not ahead and random.random() < 0.5:
                break
        assert moved, [model.issues[model.cursor % model.per_step] for model in models]


def hoist(program: Program, random: Random, moves: int) -> Program:
    """The program with some receives earlier in the text."""
    for _ in range(moves):
        rows = list(program.ops())
        found = [i for i, node in enumerate(rows) if node.target is ops.recv and i > 0]
        if found:
            i = random.choice(found)
            rows[random.randrange(max(0, i - 6), i)].prepend(rows[i])
    place_frees(program)
    return program


def machine(budgets: list[int]) -> Hardware:
    document = Hardware.cpu(len(budgets), memory="1GB", dram="1GB", ssd="1GB").model_dump(mode="json")
    for device, num_bytes in zip(document["devices"], budgets):
        device |= {"kind": "cuda", "memory_bytes": num_bytes, "usable_fraction": 1.0}
    return Hardware.from_any(document)


def least_bytes(program: Program) -> int:
    profile = profile_memory(program)
    return profile.persistent.total(ops.DEVICE) + profile.arena_bytes + pools_of(program).peaks.total()


SHAPES = st.fixed_dictionaries(
    {
        "num_devices": st.integers(2, 3),
        "num_stages": st.integers(3, 5),
        "micro_batches": st.integers(1, 4),
        "fetched": st.booleans(),
        "kept": st.booleans(),
        "prefetch": st.booleans(),
        "clip": st.booleans(),
        "split": st.booleans(),
        "moved": st.sampled_from(["", "", "dram", "ssd"]),
        "width": st.just(8),
        "rows": st.sampled_from([4, 64]),
    }
)


# Hosts do not meet between steps here; where they do, they wait for more, but never for a later step.
@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(SHAPES, st.integers(0, 2**32), st.integers(0, 4), st.sampled_from([0, 512, 5000, 10**6]), st.booleans())
def test_what_the_verifier_passes_ends_in_any_interleaving_and_keeps_its_shares(
    shape: dict[str, Any], seed: int, moves: int, slack_bytes: int, ahead: bool
) -> None:
    random = Random(seed)
    programs = [hoist(program, random, moves) for program in pipeline(**shape)]
    budgets = [max(1, least_bytes(program)) + slack_bytes for program in programs]
    try:
        verify(programs, machine(budgets))
    except VerifyError as error:
        assume("deadlock" not in str(error))
        raise
    models = [Model(program, budget, steps=3) for program, budget in zip(programs, budgets)]
    run(models, random, ahead)
    for model in models:
        assert all(model.most[pool] <= model.shares.get(pool, 0) for pool in model.most)


def test_with_waits_for_the_sum_alone_a_stream_takes_more_than_its_share() -> None:
    programs = pipeline(2, 4, 6, fetched=False, kept=True, width=8, rows=64)
    budgets = [least_bytes(program) for program in programs]
    apart = [Model(program, budget) for program, budget in zip(programs, budgets)]
    joint = [Model(program, budget + 2000, pooled=False) for program, budget in zip(programs, budgets)]
    for models in (apart, joint):
        run(models, Random(0), ahead=True)
    assert all(model.most[pool] <= model.shares.get(pool, 0) for model in apart for pool in model.most)
    assert any(model.most[pool] > model.shares.get(pool, 0) for model in joint for pool in model.most)


def test_a_host_that_waits_for_its_own_thread_before_a_send_that_feeds_it_is_a_deadlock() -> None:
    """Device 0 updates in DRAM with a gradient from device 1, and fetches the new weights before it sends what device 1
    makes that gradient of. Streams alone could do that; the thread that issues for all of them cannot."""
    programs = pipeline(2, 2, 1)
    first = programs[0]
    send = next(node for node in first.ops() if node.target is ops.send)
    fetched = first.emit(ops.fetch, "stage0.weights")[0]
    fetched.append(send)
    place_frees(first)
    order = build_order(programs, {})
    assert find_cycle(order) is None
    add_host_waits(order, programs, [0, 1])
    ring = find_cycle(order)
    assert ring is not None and any("host" in why for _, why in ring)
    with pytest.raises(VerifyError, match="deadlock"):
        verify(programs, machine([10**6, 10**6]))
