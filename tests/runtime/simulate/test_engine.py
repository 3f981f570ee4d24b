"""The simulator: times worked out by hand, and bounds that no program may break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from penstock.ir import ops
from penstock.ir.errors import HardwareError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import (
    Drain,
    Interface,
    Program,
    TensorSpec,
    build_order,
    drain_of,
    memory_change,
    place_frees,
    producer_of,
    profile_memory,
)
from penstock.ir.verify.case import Case
from penstock.runtime.simulate import CostModel, Span, Timeline, simulate, simulate_steps
from penstock.runtime.simulate.costs import OWN_CALLS
from penstock.runtime.simulate.engine import _Engine, _Simulation
from penstock.tests.ir.program.handmade import linear_stages, pipeline

WIDTH = 256
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def machine(num_devices: int = 2, **changes: object) -> Hardware:
    """GPUs under one root complex, round figures: links 1e9 B/s, no latency unless asked for, no P2P."""
    device = {
        "kind": "cuda", "memory_bytes": 10**9, "usable_fraction": 1.0, "peak_flops": {"fp32": 1e12},
        "achieved_fraction": 1.0, "memory_bandwidth": 1e12, "h2d_bandwidth": 1e9, "d2h_bandwidth": 1e9,
        "link_latency_s": 0.0, "op_overhead_s": 0.0,
    } | changes  # fmt: skip
    host = {
        "dram_bytes": 10**10, "dram_usable_fraction": 1.0, "dram_bandwidth": 1e10, "cpu_cores": 4,
        "optimizer_params_per_s": 1e6, "root_complexes": [{"bandwidth_up": 1e9, "bandwidth_down": 1e9}],
    }  # fmt: skip
    devices = [{"name": f"gpu{i}"} | device for i in range(num_devices)]
    return Hardware.model_validate({"name": "round", "source": "made up", "hosts": [host], "devices": devices})


def spans_of(timeline: Timeline, op: str, device: int | None = None) -> list[Span]:
    return [span for span in timeline.spans if span.op == op and device in (None, span.device)]


def interface(num_devices: int, rows: int = 256, flops: float = 1e9) -> Interface:
    stages = linear_stages(4, WIDTH, rows, flops)
    groups = {"world": tuple((d, "", "") for d in range(num_devices))}
    return Interface(stages, {"x": TensorSpec("x", (rows, WIDTH), "float32")}, num_devices, 1, groups)


def fetching(num_devices: int) -> list[Program]:
    """Each device fetches a stage of its own and frees it."""
    programs = [Program(d, interface(num_devices)) for d in range(num_devices)]
    for program in programs:
        program.emit(ops.fetch, f"stage{program.device}.weights")
        place_frees(program)
    return programs


def test_a_fetch_takes_its_latency_and_its_bytes() -> None:
    timeline = simulate(fetching(1), machine(1, link_latency_s=1e-3))
    assert timeline.step_s == pytest.approx(1e-3 + WEIGHT_BYTES / 1e9)
    assert timeline.moved_bytes["rc0.0.down"] == timeline.moved_bytes["gpu0.down"] == WEIGHT_BYTES
    assert timeline.moved_bytes["rc0.0.up"] == 0


def test_fetches_under_one_root_complex_share_it() -> None:
    timeline = simulate(fetching(3), machine(3))
    assert timeline.step_s == pytest.approx(3 * WEIGHT_BYTES / 1e9)
    assert timeline.bottleneck() == ("rc0.0.down", pytest.approx(1.0))


def test_a_fetch_with_a_lower_turn_has_the_root_complex_to_itself() -> None:
    programs = fetching(2)
    for program, turn in zip(programs, (1, 0), strict=True):
        next(node for node in program.ops() if node.target is ops.fetch).kwargs = {"link_turn": turn}
    ends_s = [span.end_s for span in spans_of(simulate(programs, machine(2)), "fetch")]
    assert ends_s == pytest.approx([2 * WEIGHT_BYTES / 1e9, WEIGHT_BYTES / 1e9])


def test_devices_may_begin_late() -> None:
    timeline = simulate(fetching(2), machine(2), start=[0.0, 5.0])
    assert [span.start_s for span in spans_of(timeline, "fetch")] == [0.0, 5.0]
    assert timeline.step_s == pytest.approx(5.0 + WEIGHT_BYTES / 1e9)


def test_computation_is_arithmetic_traffic_and_launches() -> None:
    programs = pipeline(1, 1, 1, flops=1e9, fetched=False)
    stage = programs[0].interface.stages["stage0"]
    stage = replace(stage, launches=5)
    programs[0].with_interface(stages={"stage0": stage})
    timeline = simulate(programs, machine(1, op_overhead_s=1e-3))
    forward, backward = spans_of(timeline, "forward")[0], spans_of(timeline, "backward")[0]
    assert forward.end_s - forward.start_s == pytest.approx(1e9 / 1e12 + (5 + OWN_CALLS) * 1e-3)
    assert backward.end_s - backward.start_s == pytest.approx(3e9 / 1e12 + (15 + OWN_CALLS) * 1e-3)  # rematerialises
    slow_memory = simulate(programs, machine(1, memory_bandwidth=1e3))
    forward = spans_of(slow_memory, "forward")[0]
    assert forward.end_s - forward.start_s == pytest.approx(1e9 / 1e12 + stage.forward_traffic_bytes / 1e3)


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(HardwareError, match="bf16"):
        simulate(pipeline(1, 1, 1), machine(1), precision="bf16")


def test_messages_are_staged_through_dram_and_meet() -> None:
    programs = pipeline(2, 2, 1, width=WIDTH, rows=256, flops=1e9, fetched=False)
    timeline = simulate(programs, machine(2))
    num_bytes = 4 * 256 * WIDTH
    send, recv = spans_of(timeline, "send", 0)[0], spans_of(timeline, "recv", 1)[0]
    assert (send.start_s, send.end_s) == (recv.start_s, recv.end_s)
    assert send.start_s == pytest.approx(spans_of(timeline, "forward", 0)[0].end_s)
    assert send.end_s - send.start_s == pytest.approx(num_bytes / 1e9)
    assert timeline.moved_bytes["gpu0.up"] == timeline.moved_bytes["gpu1.down"] == num_bytes
    assert timeline.moved_bytes["rc0.0.up"] == 2 * num_bytes  # the activation and its gradient
    assert timeline.moved_bytes["rc0.0.down"] == 3 * num_bytes  # these and the input


def test_activations_go_before_weights_that_are_asked_for_ahead() -> None:
    programs = [Program(d, interface(2)) for d in range(2)]
    x = programs[0].emit(ops.load, programs[0].batch, "x", micro_batch=0)[0]
    programs[0].emit(ops.send, x, dst=1, tag="t")
    programs[1].emit(ops.fetch, "stage1.weights")
    programs[1].emit(ops.recv, "stage0.h1", src=0, tag="t")
    for program in programs:
        place_frees(program)
    timeline = simulate(programs, machine(2))
    x_bytes = x.meta["type"].bytes
    recv, fetch = spans_of(timeline, "recv")[0], spans_of(timeline, "fetch")[0]
    # The input and the activation take all of rc0.0.down, one after the other; the weights move after them.
    assert recv.end_s == pytest.approx(2 * x_bytes / 1e9)
    assert fetch.end_s == pytest.approx((2 * x_bytes + WEIGHT_BYTES) / 1e9)


def test_updates_on_the_cpu_share_the_host() -> None:
    one = simulate(pipeline(1, 1, 1, width=WIDTH), machine(1))
    two = simulate(pipeline(2, 2, 1, width=WIDTH), machine(2))
    alone_s = WIDTH * WIDTH / 1e6
    step = spans_of(one, "step")[0]
    assert step.stream == "cpu" and step.end_s - step.start_s == pytest.approx(alone_s)
    last = max(span.end_s for span in spans_of(two, "step"))
    first = min(span.start_s for span in spans_of(two, "step"))
    assert last - first == pytest.approx(2 * alone_s, rel=1e-3)


def test_an_update_on_the_device_is_bound_by_its_memory() -> None:
    timeline = simulate(pipeline(1, 1, 1, width=WIDTH, fetched=False), machine(1))
    step = spans_of(timeline, "step")[0]
    assert step.stream == "compute"
    assert step.end_s - step.start_s == pytest.approx((8 + 2 * 8 + 4) * WIDTH * WIDTH / 1e12)


def test_a_collective_waits_for_all_members_and_moves_in_a_ring() -> None:
    programs = pipeline(2, 2, 1, width=WIDTH, clip=True)
    timeline = simulate(programs, machine(2))
    calls = spans_of(timeline, "all_reduce")
    assert len({(span.start_s, span.end_s) for span in calls}) == 1
    assert calls[0].start_s == pytest.approx(max(span.end_s for span in spans_of(timeline, "norm")))
    tied = {"tie": ((0, "stage0", "layer0.weight"), (1, "stage1", "layer1.weight"))}
    programs = [Program(d, replace(interface(2), groups=tied)) for d in range(2)]
    for d, program in enumerate(programs):
        w = program.emit(ops.resident, f"stage{d}.weights")[0]
        like = "x" if d == 0 else "h1"
        x = program.emit(ops.load, program.batch, "x", micro_batch=0, names=[like])[0]
        h = program.emit(ops.load, program.batch, "x", micro_batch=0)[0]
        grads = program.emit(ops.backward, f"stage{d}", w, None, [x], [h], micro_batch=0)[-1]
        program.emit(ops.all_reduce, grads, group="tie")
        place_frees(program)
    call = spans_of(simulate(programs, machine(2)), "all_reduce")[0]
    # Two members: each sends a half twice, and all of it passes the root complex up and down.
    assert call.end_s - call.start_s == pytest.approx(2 * WEIGHT_BYTES / 1e9)


def test_a_fetch_waits_for_its_place_in_the_arena() -> None:
    timeline = simulate(pipeline(1, 2, 2, width=WIDTH, flops=1e9, prefetch=False), machine(1))
    fetches = spans_of(timeline, "fetch")
    forwards = spans_of(timeline, "forward")
    assert fetches[1].start_s >= forwards[1].end_s  # after the last reader of the first stage's weights
    early = simulate(pipeline(1, 2, 2, width=WIDTH, flops=1e9), machine(1))
    assert spans_of(early, "fetch")[1].start_s < forwards[1].end_s
    assert early.step_s < timeline.step_s


def test_a_tight_memory_delays_but_never_overflows() -> None:
    program = Program(0, interface(1))
    weights = program.emit(ops.resident, "stage0.weights")[0]
    x = program.emit(ops.load, program.batch, "x", micro_batch=0)[0]
    made = program.emit(ops.forward, "stage0", weights, x, micro_batch=0, keep=False)
    program.emit(ops.free, x, *made)
    program.emit(ops.free, *program.emit(ops.load, program.batch, "x", micro_batch=0))
    need_bytes = profile_memory(program).peak_bytes[ops.DEVICE]
    tight = simulate([program], machine(1, memory_bytes=need_bytes))
    loose = simulate([program], machine(1, memory_bytes=2 * need_bytes))
    first, second = spans_of(loose, "load")
    assert second.start_s == first.end_s
    assert spans_of(tight, "load")[1].start_s == spans_of(tight, "forward")[0].end_s > first.end_s
    assert max(taken for _, taken in tight.memory["gpu0"]) == tight.peak_bytes["gpu0"] == need_bytes
    assert need_bytes < max(taken for _, taken in loose.memory["gpu0"]) <= 2 * need_bytes


def test_programs_that_cannot_run_are_refused() -> None:
    programs = pipeline(2, 2, 2)
    sends = [node for node in programs[0].ops() if node.target is ops.send]
    sends[0].kwargs, sends[1].kwargs = sends[1].kwargs, sends[0].kwargs  # receives come in the other order now
    with pytest.raises(VerifyError, match="deadlock"):
        simulate(programs, machine(2))
    sends[0].kwargs = {**sends[0].kwargs, "tag": "else"}
    with pytest.raises(VerifyError, match="never receives"):
        simulate(programs, machine(2))


def exchanges(num_devices: int, events: Sequence[tuple[int, int, int]]) -> list[Program]:
    """Random traffic that can always run: its events happen one after the other. Kind 0 loads, 1 sends, 2 adds."""
    programs = [Program(d, interface(num_devices, rows=64)) for d in range(num_devices)]
    held: list[list[fx.Node]] = [[] for _ in programs]
    for number, (kind, where, pick) in enumerate(events):
        device = where % num_devices
        program, own = programs[device], held[device]
        if kind == 1 and own and num_devices > 1:
            other = (device + 1 + pick % (num_devices - 1)) % num_devices
            program.emit(ops.send, own[pick % len(own)], dst=other, tag=str(number))
            held[other] += programs[other].emit(ops.recv, "stage0.h1", src=device, tag=str(number))
        elif kind == 2 and len(own) > 1:
            left = own.pop(pick % len(own))
            own += program.emit(ops.add, left, own[pick % len(own)])
        else:
            own += program.emit(ops.load, program.batch, "x", micro_batch=0)
    for program in programs:
        place_frees(program)
    return programs


@st.composite
def any_programs(draw: st.DrawFn) -> list[Program]:
    num_devices = draw(st.integers(1, 3))
    if draw(st.booleans()):
        event = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5))
        return exchanges(num_devices, draw(st.lists(event, min_size=1, max_size=40)))
    return pipeline(
        num_devices, draw(st.integers(num_devices, 6)), draw(st.integers(1, 4)), width=32,
        rows=draw(st.sampled_from([1, 64, 512])), flops=draw(st.sampled_from([1e3, 1e7])), fetched=draw(st.booleans()),
        prefetch=draw(st.booleans()), clip=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def any_machine(draw: st.DrawFn, num_devices: int, memory_bytes: int) -> Hardware:
    rates = st.sampled_from([1e7, 1e8, 1e9])
    changes = {"h2d_bandwidth": draw(rates), "d2h_bandwidth": draw(rates)}
    changes["link_latency_s"] = draw(st.sampled_from([0.0, 1e-4]))
    hardware = machine(num_devices, **changes, memory_bytes=memory_bytes)
    return hardware.with_(p2p=True) if draw(st.booleans()) else hardware


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_program_breaks_its_bounds(data: st.DataObject) -> None:
    programs = data.draw(any_programs())
    peak_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    budget_bytes = int(peak_bytes * data.draw(st.sampled_from([1.0, 1.3, 100.0]))) + 1
    hardware = data.draw(any_machine(len(programs), budget_bytes))
    try:
        timeline = simulate(programs, hardware)
    except VerifyError as error:  # a tight memory may close a ring; the verifier says so as well
        assert "device memory must be given back first" in str(error)
        return
    check_bounds(programs, hardware, timeline)
    check_streams(timeline)
    for device in hardware.devices:
        assert max(taken for _, taken in timeline.memory[device.name]) <= budget_bytes
    for name, peak in timeline.peak_bytes.items():
        assert timeline.memory[name][0][1] <= peak


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_several_steps_keep_to_the_memory_and_to_what_links_carry(data: st.DataObject) -> None:
    programs = data.draw(any_programs())
    peak_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    budget_bytes = int(peak_bytes * data.draw(st.sampled_from([1.0, 1.3, 100.0]))) + 1
    hardware = data.draw(any_machine(len(programs), budget_bytes))
    try:
        alone = simulate(programs, hardware)
    except VerifyError:
        with pytest.raises(VerifyError):  # several steps have a ring of waits exactly if one has
            _Simulation(programs, hardware, "fp32", len(programs)).run(steps=3)
        return
    simulation = _Simulation(programs, hardware, "fp32", len(programs))
    case, engine = simulation.case, simulation.run(steps=3)
    busiest_s = max(share * alone.step_s for share in alone.link_busy.values())
    assert max(engine.ended_s.values()) >= 3 * busiest_s * (1 - 1e-6)
    for program, rows in zip(programs, held_over_steps(programs, case, engine), strict=True):
        assert max(rows) <= budget_bytes, f"device {program.device}"


def held_over_steps(programs: list[Program], case: Case, engine: _Engine) -> list[list[int]]:
    """Per device the bytes that are held after every change in three steps."""
    order, found = engine.order, []
    for program in programs:
        profile = case.profiles[program.device]
        changes = [(0.0, profile.persistent.total(ops.DEVICE) + profile.arenas[ops.DEVICE])]
        returned = [value for values in program.results().values() for value in values]
        kept_bytes = sum(v.meta["type"].bytes for v in returned if v.meta["type"].memory == ops.DEVICE)
        for step in range(3):
            first = step * order.per_step
            for node in program.ops():
                taken, given = memory_change(node, order.work_of[node], ops.DEVICE)
                task = first + order.task_of[node]
                changes += [(engine.began_s[task], taken), (engine.ended_s[task], -given)]
            given_s = [engine.ended_s[first + order.task_of[producer_of(value)]] for value in returned]
            changes.append((max(given_s, default=0.0), -kept_bytes))
        changes.sort()
        found.append(list(accumulate(change for _, change in changes)))
    return found


def test_the_next_step_begins_behind_the_updates_that_it_needs() -> None:
    """The host updates slowly: it is never idle, while drained steps leave it idle during each forward."""
    programs = pipeline(1, 4, 2, width=WIDTH, rows=256, flops=1e9)
    alone = simulate(programs, machine(1))
    updating_s = alone.busy_share[0, ops.CPU] * alone.step_s
    after = simulate_steps(programs, machine(1), drain_of(programs, "fp32"))
    assert after.spans == alone.spans
    assert updating_s < after.step_s < alone.step_s * 0.999
    assert alone.step_s == alone.from_rest_s == simulate_steps(programs, machine(1), Drain.UNDO).step_s


def test_steps_of_a_device_without_stages() -> None:
    """It only takes part in the norm, with no gradients of its own."""
    programs = pipeline(2, 1, 2, clip=True)
    alone = simulate(programs, machine(2))
    assert 0 < simulate_steps(programs, machine(2), None).step_s <= alone.step_s


def test_steps_that_may_be_undone_or_scale_their_loss_are_drained() -> None:
    programs = pipeline(1, 4, 2, width=WIDTH, rows=256, flops=1e9)
    assert drain_of(programs, "fp16") is Drain.LOSS_SCALE and drain_of(programs, "bf16") is None
    undone = pipeline(1, 4, 2, width=WIDTH, rows=256, flops=1e9, clip=True, speculative=True)
    assert drain_of(undone, "fp32") is Drain.UNDO


def check_bounds(programs: list[Program], hardware: Hardware, timeline: Timeline) -> None:
    """At least the critical path and every link's bytes at full rate; at most everything one after the other."""
    order = build_order(programs, Case(programs, hardware).memories)
    model = CostModel(hardware, "fp32")
    alone_s = []
    for task in order.tasks:
        cost = model.cost(task)
        flows = [amount / min(model.links[name].bandwidth for name in path) for path, amount in cost.flows]
        alone_s.append(cost.fixed_s + max(flows, default=0.0))
    ends: dict[int, float] = {}

    def end_s(index: int) -> float:
        if index not in ends:
            ends[index] = max((end_s(other) for other, _ in order.tasks[index].waits), default=0.0) + alone_s[index]
        return ends[index]

    assert timeline.step_s >= max(end_s(index) for index in range(len(order.tasks))) * (1 - 1e-9)
    for name, link in hardware.links().items():
        assert timeline.step_s >= timeline.moved_bytes[name] / link.bandwidth * (1 - 1e-6)
        assert timeline.link_busy[name] <= 1 + 1e-6
    in_turn_s = sum(
        cost.fixed_s + sum(amount / min(model.links[name].bandwidth for name in path) for path, amount in cost.flows)
        for cost in map(model.cost, order.tasks)
    )
    assert timeline.step_s <= in_turn_s * (1 + 1e-6)


def check_streams(timeline: Timeline) -> None:
    """A stream does one thing at a time, in the order of the text."""
    last: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        key = (span.device, span.stream)
        assert span.end_s >= span.start_s >= last.get(key, 0.0)
        last[key] = span.end_s
