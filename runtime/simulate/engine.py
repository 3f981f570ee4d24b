"""A discrete-event simulation of one step on all devices: the third way to run a program, in which only time passes.

Tasks start in the order of `ir/program/order.py`: operands, streams, rendezvous and memory. `costs.py` has the cost of
each task, and `sharing.py` says how transfers share links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import (
    WRITTEN_OUT,
    Drain,
    Order,
    Program,
    build_order,
    memory_change,
    print_node,
    producer_of,
    shown,
)
from ...ir.verify.case import Case
from ...ir.verify.devices import check_collectives, check_devices, check_messages, fail_on_ring
from .costs import CostModel, WholeMachine
from .sharing import TasksUnderWay
from .timeline import Span, Timeline

SETTLED = 3  # the number of steps after which the time between two ends stays the same


def simulate(
    programs: Sequence[Program],
    hardware: Hardware,
    *,
    precision: str = "fp32",
    start: Sequence[float] | None = None,
    written_out: int = WRITTEN_OUT,
) -> Timeline:
    """Time one step of all devices, without running anything.

    `precision` ("fp32", "bf16", "fp16") selects the devices' arithmetic rates; `start` gives the second at which each
    device begins. Programs must have their types, as every pass leaves them, but need not fit the memories: an op that
    does not fit waits for everything that is freed before it, and `peak_bytes` says how much the step needs.
    All lanes run one lane's programs. On up to `written_out` devices every lane is simulated; on more devices, one lane
    on its part of the machine, if all lanes are alike and so do the same at the same time.
    Raises VerifyError when messages do not match or devices wait for each other in a ring, HardwareError when a device
    has no rate for the precision.
    """
    simulation = _Simulation(programs, hardware, precision, written_out)
    return _timeline(simulation, simulation.run(start))


def simulate_steps(
    programs: Sequence[Program],
    hardware: Hardware,
    drain: Drain | None,
    *,
    precision: str = "fp32",
    written_out: int = WRITTEN_OUT,
) -> Timeline:
    """The result of `simulate` for the same arguments, with `steady_s`: the time of a step where a script makes step
    after step.

    The devices begin the next step as soon as they have the loss, after the rest of this one, except where steps
    are drained (`drain`); see `DeviceSession.begin_step`.
    """
    simulation = _Simulation(programs, hardware, precision, written_out)
    alone = _timeline(simulation, simulation.run())
    if drain is not None:
        return replace(alone, steady_s=alone.from_rest_s)
    steady_s = simulation.steady_s()
    link_busy = {name: share * alone.from_rest_s / steady_s for name, share in alone.link_busy.items() if steady_s}
    return replace(alone, steady_s=steady_s, link_busy=link_busy)


def step_seconds(
    programs: Sequence[Program],
    hardware: Hardware,
    drain: Drain | None,
    *,
    precision: str = "fp32",
    written_out: int = WRITTEN_OUT,
) -> float:
    """`simulate_steps(...).step_s` alone, which takes less time."""
    if drain is not None:
        return seconds_from_rest(programs, hardware, precision=precision, written_out=written_out)
    return _Simulation(programs, hardware, precision, written_out).steady_s()


def seconds_from_rest(
    programs: Sequence[Program], hardware: Hardware, *, precision: str = "fp32", written_out: int = WRITTEN_OUT
) -> float:
    """`simulate(...).step_s` alone, which takes less time."""
    ended_s = _Simulation(programs, hardware, precision, written_out).run().ended_s
    return max(ended_s.values(), default=0.0)


class _Simulation:
    """The devices that are written out, as a case with their part of the machine."""

    def __init__(self, programs: Sequence[Program], hardware: Hardware, precision: str, written_out: int):
        written, self.hardware = shown(programs, hardware, written_out)
        fleet = None if self.hardware is hardware else WholeMachine(hardware, programs[0].interface)
        self.model = CostModel(self.hardware, precision, fleet)
        self.case = Case(written, self.hardware)
        for rule in (check_devices, check_messages, check_collectives):
            rule(self.case)

    def steady_s(self) -> float:
        """Seconds between the ends of two steps, one right after another."""
        engine = self.run(steps=SETTLED)
        ends_s = [0.0] * SETTLED
        for index, end_s in engine.ended_s.items():
            step = index // engine.order.per_step
            ends_s[step] = max(ends_s[step], end_s)
        return ends_s[-1] - ends_s[-2]

    def run(self, start: Sequence[float] | None = None, steps: int = 1) -> _Engine:
        order = build_order(self.case.programs, self.case.memories, steps)
        _wait_for_calls(order, self.case.programs)
        engine = _Engine(order, self.model)
        engine.run(start)
        if len(engine.ended_s) < len(order.tasks):
            fail_on_ring(self.case, order)
            raise AssertionError("the simulation stopped, but no ring of waits was found")
        return engine


def _wait_for_calls(order: Order, programs: Sequence[Program]) -> None:
    """Let each step after the first wait for what the script waits for before it calls for that step: all that the step
    before returns and its first forwards, and the end of the step before that one."""
    if len(order.tasks) == order.per_step:
        return
    given, last, forwards = set[int](), dict[tuple[int, str], int](), set[tuple[int, object, object]]()
    for program in programs:
        given |= {order.task_of[producer_of(v)] for values in program.results().values() for v in values}
        for node in program.ops():
            last[program.device, order.work_of[node].stream] = order.task_of[node]
            if node.target is not ops.forward:
                continue
            turn = (program.device, node.args[0], node.kwargs["micro_batch"])
            if turn not in forwards:
                forwards.add(turn)
                given.add(order.task_of[node])
    for index in range(order.per_step, len(order.tasks)):
        first = index - index % order.per_step
        task = order.tasks[index]
        if any(other >= first for other, _ in task.waits):
            continue
        task.waits += [(first - order.per_step + other, "the step before is called first") for other in given]
        if first > order.per_step:
            ends = last.values()
            task.waits += [(first - 2 * order.per_step + other, "an earlier step must end first") for other in ends]


class _Engine:
    """Runs the tasks of an order, and records when each task began and ended."""

    def __init__(self, order: Order, model: CostModel):
        self.order = order
        self.tasks = order.tasks
        one_step = [model.cost(task) for task in order.tasks[: order.per_step]]
        self.costs = one_step * (len(order.tasks) // max(1, order.per_step))
        self.progress = TasksUnderWay(model.links)
        self.blocked_by = [len(task.waits) for task in order.tasks]
        self.followers: list[list[int]] = [[] for _ in order.tasks]
        for index, task in enumerate(order.tasks):
            for other, _ in task.waits:
                self.followers[other].append(index)
        self.began_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}

    def run(self, start: Sequence[float] | None) -> None:
        offsets = start or []
        for index, blocked in enumerate(self.blocked_by):
            if not blocked:
                self.begin(index, 0.0, offsets)
        while self.progress.events:
            now_s, over = self.progress.pop()
            if over is not None:
                self.end(over, now_s, offsets)

    def begin(self, index: int, now_s: float, offsets: Sequence[float]) -> None:
        if offsets:
            now_s = max(now_s, *(offsets[device] for device, _, _ in self.tasks[index].parts))
        self.began_s[index] = now_s
        self.progress.begin(index, self.costs[index], now_s)

    def end(self, index: int, now_s: float, offsets: Sequence[float]) -> None:
        self.ended_s[index] = now_s
        for follower in self.followers[index]:
            self.blocked_by[follower] -= 1
            if not self.blocked_by[follower]:
                self.begin(follower, now_s, offsets)


def _timeline(simulation: _Simulation, engine: _Engine) -> Timeline:
    case, hardware, order = simulation.case, simulation.hardware, engine.order
    names = [device.name for device in hardware.devices[: len(case.programs)]]
    spans, peak_bytes = [], {name: case.profiles[device].peak_bytes[ops.DEVICE] for device, name in enumerate(names)}
    for program in case.programs:
        for memory in (ops.DRAM, ops.SSD):
            host, own = (
                f"{memory}{hardware.devices[program.device].host}",
                case.profiles[program.device].peak_bytes[memory],
            )
            if own or memory == ops.DRAM:
                peak_bytes[host] = peak_bytes.get(host, 0) + own
        for node in program.ops():
            op = op_of(node)
            if not op.streams:
                continue
            task = order.task_of[node]
            stream, text = order.work_of[node].stream, print_node(node) or ""
            began_s, ended_s = engine.began_s[task], engine.ended_s[task]
            spans.append(Span(program.device, stream, op.name, text, began_s, ended_s))
    moved, busy_s = ({link: 0.0 for link in hardware.links()} for _ in range(2))
    for path, amount in engine.progress.moved.items():
        for name in path:
            link = simulation.model.links[name]
            whole_name = link.part_of or name
            if whole_name in moved:
                moved[whole_name] += amount
                busy_s[whole_name] += amount / link.bandwidth
    step_s = max(engine.ended_s.values(), default=0.0)
    busy = {name: busy_s[name] / step_s if step_s else 0.0 for name in moved}
    whole = {link: round(amount) for link, amount in moved.items()}
    return Timeline(spans, names, peak_bytes, whole, busy, _memory_over_time(case, hardware, order, engine))


def _memory_over_time(
    case: Case, hardware: Hardware, order: Order, engine: _Engine
) -> dict[str, list[tuple[float, int]]]:
    """For each memory, rows (second, bytes held) after every change."""
    changes: dict[str, list[tuple[float, int]]] = {}
    for program in case.programs:
        owner, profile = hardware.devices[program.device], case.profiles[program.device]
        for memory, name in ((ops.DEVICE, owner.name), (ops.DRAM, f"dram{owner.host}")):
            rows = changes.setdefault(name, [])
            rows.append((0.0, profile.persistent.total(memory) + profile.arenas[memory]))
            for node in program.ops():
                taken, given = memory_change(node, order.work_of[node], memory)
                task = order.task_of[node]
                rows += [(engine.began_s[task], taken)] if taken else []
                rows += [(engine.ended_s[task], -given)] if given else []
    found = {}
    for name, rows in changes.items():
        rows.sort()
        found[name] = list(zip((at_s for at_s, _ in rows), accumulate(change for _, change in rows)))
    return found
