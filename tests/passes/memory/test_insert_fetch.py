"""`insert-fetch`: weights come in time, leave, and never exceed the memory; looking ahead hides the link."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, infer_all, plan_arena, profile_memory
from penstock.ir.verify import verify
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.fetch_queue import AHEAD, Fetches, arena_bytes, deepen, live_bytes
from penstock.passes.memory.insert_fetch import (
    InsertFetch,
    bytes_with_fetches,
    fetch_weights,
    fetches_of,
    look_ahead,
    swap,
)
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition_min_stage import PartitionMinStage
from penstock.passes.phases import fetched_phases, phases
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import all_passes, apply, chain, draft_of, text_of, to_schedule


def ready(hardware: Hardware, depth: int = 7, remat: bool = True, **sizes: int) -> Draft:
    draft = draft_of(chain(depth, **sizes), hardware, micro_batches=2)
    apply(draft, *to_schedule(depth + 1))
    names = [s.spec.name for s in draft.stages]
    return apply(draft, InsertRemat(), decisions={"rematerialise": names if remat else []})


def swapping(memory: str = "21kB", num_devices: int = 2, **links: str) -> Hardware:
    return Hardware.cpu(num_devices=num_devices, memory=memory, **links)


def test_text(golden: Golden) -> None:
    draft = draft_of(chain(depth=3), Hardware.cpu(num_devices=2), micro_batches=2)
    apply(draft, *to_schedule(4))
    whole = len(draft.stages[0].spec.params)
    fetch = {"stage0": {"backward": whole}, "stage1": {}, "stage2": {"forward": 1}, "stage3": {}}
    remat = {"rematerialise": ["stage0", "stage1", "stage2"]}
    apply(draft, InsertRemat(), InsertFetch(), decisions={"fetch": fetch, **remat})
    golden(text_of(draft), "looks-ahead-on-device-0")


def test_roomy_devices_fetch_nothing() -> None:
    assert InsertFetch().plan(ready(Hardware.cpu())) == {}


def test_a_device_whose_memory_is_dram_swaps_no_stage_that_it_has_room_for() -> None:
    apart, shared = (Hardware.cpu(2, memory="20MB", dram="50MB").with_(shared_memory=one) for one in (False, True))
    assert InsertFetch(swap=True).plan(ready(apart)) and InsertFetch(swap=True).plan(ready(shared)) == {}
    small = Hardware.cpu(2, memory="21kB", dram="5MB").with_(shared_memory=True)
    assert InsertFetch().plan(ready(small)) == InsertFetch().plan(ready(small.with_(shared_memory=False))) != {}


def test_the_last_stage_of_a_device_stays_for_its_backward() -> None:
    """Two fetches of every other stage, one of the last (Mobius 3.1)."""
    draft = ready(swapping("21kB"))
    apply(draft, *all_passes()[5:], memory=True)
    for program in draft.programs:
        fetched = [n.args[0] for n in program.ops() if n.target is ops.fetch]
        own = [s.spec.name for s in draft.stages_on(program.device)]
        assert [fetched.count(f"{name}.weights") for name in own] == [2] * (len(own) - 1) + [1]


@pytest.mark.slow
@pytest.mark.parametrize("h2d", ["200MB/s", pytest.param("1GB/s", marks=pytest.mark.slow)])
def test_looking_ahead_is_faster_on_a_slow_link(h2d: str) -> None:
    steps = []
    for prefetch in (False, True):
        draft = ready(swapping("2MB", h2d=h2d), width=128, rows=16)
        apply(draft, InsertFetch(prefetch=prefetch), *all_passes()[6:], memory=True)
        assert any(n.target is ops.fetch for n in draft.programs[0].ops())
        steps.append(simulate(draft.programs, draft.lane_hardware).step_s)
    assert steps[1] < 0.97 * steps[0]  # copies and computation share the cores of these devices


@pytest.mark.slow
def test_budgets_hold_and_more_memory_looks_ahead_more() -> None:
    """`memory=True` proves every budget, and that nobody waits for ever."""
    counts = []
    for memory in ("14.5kB", "16kB", "19kB", "20.5kB", "25kB"):
        draft = ready(swapping(memory))
        decision = InsertFetch().plan(draft)
        apply(draft, *all_passes()[5:], decisions={"fetch": decision}, memory=True)
        assert len(decision) == 8
        counts.append(sum(sum(kinds.values()) for kinds in decision.values()))
        assert "forward" not in decision["stage0"] | decision["stage1"]  # nothing runs before them
    most = sum(len(s.spec.params) * (2 if 1 < i < 6 else 1) for i, s in enumerate(draft.stages))
    assert counts == sorted({*counts}) and counts[-1] == most
    assert not any(InsertFetch().plan(ready(swapping("14kB"))).values())  # too little even without early fetches


def test_a_kept_stage_keeps_its_weights() -> None:
    """What forward saved borrows the weights, so they stay until backward and are fetched once."""
    draft = ready(Hardware.cpu(num_devices=2), depth=3, remat=False)
    names = [s.spec.name for s in draft.stages]
    apply(draft, InsertFetch(), decisions={"fetch": {name: {} for name in names}})
    for program in draft.programs:
        fetched = [n.args[0] for n in program.ops() if n.target is ops.fetch]
        assert sorted(fetched) == sorted(set(fetched))
    verify(draft.programs, draft.lane_hardware)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arena_is_foreseen_exactly(data: st.DataObject) -> None:
    """`arena_bytes` on phases equals the arena of the rewritten program, for any early fetches and kept stages; so does
    the peak, with and without CUDA graphs."""
    depth = data.draw(st.integers(2, 6))
    draft = draft_of(chain(depth), Hardware.cpu(num_devices=1), micro_batches=2)
    apply(draft, *to_schedule(depth + 1))
    names = [s.spec.name for s in draft.stages]
    remat = sorted(data.draw(st.sets(st.sampled_from(names))))
    stages = sorted(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    apply(draft, InsertRemat(), decisions={"rematerialise": remat})
    program = draft.programs[0]
    order = phases(program)
    specs = program.interface.stages
    counts = {i: data.draw(st.integers(0, len(specs[order[i].stage].params))) for i in fetched_phases(order, stages)}
    early = {i: count for i, count in counts.items() if i > 0 and count}
    ahead = {i: data.draw(st.integers(1, 4)) for i in early}
    foreseen = arena_bytes(order, specs, stages, Fetches(early, ahead))
    assert max(live_bytes(order, specs, stages, Fetches(early, ahead))) <= foreseen
    decision: dict[str, dict[str, int]] = {stage: {} for stage in stages}
    for i, count in early.items():
        decision[order[i].stage] |= {order[i].kind: count, order[i].kind + AHEAD: ahead[i]}
    assert fetches_of(order, decision).counts == early
    for cuda_graphs in (True, False):
        infer_all(program.with_interface(cuda_graphs=cuda_graphs))
        peak = swap(program.copy(), decision).peak_bytes[ops.DEVICE]
        assert bytes_with_fetches(program, stages, decision) == peak
    fetch_weights(program, decision)
    assert plan_arena(program)[1] == foreseen


def test_memory_is_used_up_to_the_budget() -> None:
    """One parameter more than planned, fetched early, would not fit."""
    draft = ready(swapping("21kB", num_devices=1))
    program, budget = draft.programs[0], 21_000
    stages = [phase.stage for phase in phases(program)]
    early = look_ahead(program, stages, budget)
    assert swap(program.copy(), early).peak_bytes[ops.DEVICE] <= budget
    order = phases(program)
    able = {(order[i].stage, order[i].kind) for i in fetched_phases(order, stages) if i > 0}
    counts = {(stage, kind): early[stage].get(kind, 0) for stage, kind in able}
    left = [key for key, count in counts.items() if count < len(program.interface.stages[key[0]].params)]
    assert left
    for stage, kind in left:
        more = {**early, stage: {**early[stage], kind: counts[stage, kind] + 1}}
        assert swap(program.copy(), more).peak_bytes[ops.DEVICE] > budget
    assert look_ahead(program, stages, budget, reserved_bytes=6_000) == {name: {} for name in early}


def test_fetched_weights_are_not_on_the_device_between() -> None:
    draft = ready(swapping("21kB"))
    before = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
    apply(draft, *all_passes()[5:])
    after = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
    assert all(a < b for a, b in zip(after, before))
    weights = sum(s.spec.weight_bytes for s in draft.stages_on(0))
    assert profile_memory(draft.programs[0]).persistent.dram["weights"] == weights


# --- the queue


def with_large_head(memory: str, h2d: str = "200MB/s", classes: int = 2048, depth: int = 6) -> Draft:
    """Small blocks before a head that is many times as large as one of them."""
    draft = draft_of(
        chain(depth, rows=32, classes=classes), Hardware.cpu(num_devices=1, memory=memory, h2d=h2d), micro_batches=1
    )
    passes = [Coarsen(), PartitionMinStage(), MapRoundRobin(), SchedulePipeline()]
    apply(draft, *passes)
    names = [s.spec.name for s in draft.stages]
    return apply(draft, InsertRemat(), decisions={"rematerialise": names})


def fetched_before(program: Program, stage: str) -> str:
    """The stage before whose first op a stage's first fetch is issued."""
    nodes = list(program.ops())
    at = next(i for i, n in enumerate(nodes) if n.target is ops.fetch and n.args[0] == f"{stage}.weights")
    return next(str(n.args[0]) for n in nodes[at:] if n.target is ops.forward)


def test_a_large_head_hides_behind_several_small_stages(golden: Golden) -> None:
    draft = with_large_head("1.2MB")
    decision = InsertFetch(swap=True).plan(draft)
    head = draft.stages[-1].spec.name
    assert decision[head]["forward_ahead"] > 2
    apply(draft, InsertFetch(), decisions={"fetch": decision}, memory=True)
    assert fetched_before(draft.programs[0], head) == f"stage{int(head[5:]) - decision[head]['forward_ahead']}"
    golden(text_of(draft), "head-behind-small-stages")


@pytest.mark.slow
def test_no_number_of_stages_is_too_many_for_a_queue() -> None:
    draft = with_large_head("1.5MB", depth=110)
    assert len(draft.stages) > 100
    assert InsertFetch(swap=True).plan(draft)[draft.stages[-1].spec.name]["forward_ahead"] > 2


QUEUED = {("1.1MB", "50MB/s"), ("1.12MB", "1GB/s"), ("1.5MB", "50MB/s")}


@pytest.mark.parametrize(
    ("memory", "h2d"),
    [
        pytest.param(*case, marks=[] if case in QUEUED else pytest.mark.slow)
        for case in itertools.product(("1.1MB", "1.12MB", "1.5MB"), ("50MB/s", "200MB/s", "1GB/s"))
    ],
)
def test_the_queue_holds_memory_and_is_never_slower(memory: str, h2d: str) -> None:
    steps = {}
    for queue in (False, True):
        draft = with_large_head(memory, h2d)
        apply(draft, InsertFetch(swap=True, queue=queue), InsertOptimizer(), memory=True)
        steps[queue] = simulate(draft.programs, draft.machine).step_s
    assert steps[True] <= steps[False] * (1 + 1e-9)


def test_more_memory_makes_the_queue_faster() -> None:
    steps = []
    for memory, queue in (("1.5MB", False), ("1.1MB", True), ("1.12MB", True), ("1.5MB", True)):
        draft = with_large_head(memory)
        apply(draft, InsertFetch(swap=True, queue=queue), memory=True)
        steps.append(simulate(draft.programs, draft.machine).step_s)
    assert steps[3] < 0.95 * steps[0] and steps[3] <= steps[2] <= steps[1]


@functools.cache
def roomy(classes: int) -> Draft:
    return with_large_head("2GB", classes=classes)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(room=st.floats(0, 1), classes=st.sampled_from([4, 64, 2048]))
def test_fetches_keep_the_order_in_which_stages_run(room: float, classes: int) -> None:
    """One stream carries them; and the arena stays within whatever limit there is above that of one phase ahead."""
    draft = roomy(classes)
    program = draft.programs[0]
    order, specs = phases(program), program.interface.stages
    stages = [s.spec.name for s in draft.stages]
    counts = {i: len(specs[order[i].stage].params) for i in fetched_phases(order, stages) if i > 0}
    least = arena_bytes(order, specs, stages, Fetches(counts))
    most = sum(specs[order[i].stage].weight_bytes for i in fetched_phases(order, stages))
    limit = least + int(room * (most - least))
    found = deepen(order, specs, stages, counts, limit)
    assert arena_bytes(order, specs, stages, found) <= limit
    places = [found.place(i) for i in counts]
    assert places == sorted(places) and all(place < i for i, place in zip(counts, places))


def test_a_depth_that_a_person_wrote() -> None:
    """What the queue does is plain data; nonsense is refused."""
    draft = with_large_head("2GB")
    names = [s.spec.name for s in draft.stages]
    whole = {s.spec.name: {"forward": len(s.spec.params), "forward_ahead": 99} for s in draft.stages}
    apply(draft, InsertFetch(), decisions={"fetch": {**whole, names[0]: {}}}, memory=True)
    fetched = [str(n.args[0]) for n in draft.programs[0].ops() if n.target in (ops.fetch, ops.forward)]
    assert fetched[: len(names)] == [f"{name}.weights" for name in names]  # all of them before the first forward
    for kinds in ({"forward": 1, "forward_ahead": 0}, {"forward_ahead": 2}, {"sideways": 1}):
        with pytest.raises(PassError, match="ahead"):
            InsertFetch().rewrite(with_large_head("2GB"), {names[1]: kinds})
