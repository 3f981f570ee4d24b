"""`insert-fetch`: weights come in time, leave, and never exceed the memory; looking ahead hides the link."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import plan_arena, profile_memory
from penstock.ir.verify import verify
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_fetch import InsertFetch, arena_bytes, fetch_weights, look_ahead, profile_swapped
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.phases import fetched_phases, phases
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


def test_the_last_stage_of_a_device_stays_for_its_backward() -> None:
    """Two fetches of every other stage, one of the last (Mobius 3.1)."""
    draft = ready(swapping("21kB"))
    apply(draft, *all_passes()[5:], memory=True)
    for program in draft.programs:
        fetched = [n.args[0] for n in program.ops() if n.target is ops.fetch]
        own = [s.spec.name for s in draft.stages_on(program.device)]
        assert [fetched.count(f"{name}.weights") for name in own] == [2] * (len(own) - 1) + [1]


@pytest.mark.parametrize("h2d", ["200MB/s", "1GB/s"])
def test_looking_ahead_is_faster_on_a_slow_link(h2d: str) -> None:
    steps = []
    for prefetch in (False, True):
        draft = ready(swapping("2MB", h2d=h2d), width=128, rows=16)
        apply(draft, InsertFetch(prefetch=prefetch), *all_passes()[6:], memory=True)
        assert any(n.target is ops.fetch for n in draft.programs[0].ops())
        steps.append(simulate(draft.programs, draft.lane_hardware).step_s)
    assert steps[1] < 0.97 * steps[0]  # copies and computation share the cores of these devices


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
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == most > counts[2] > 0


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
    """`arena_bytes` on phases equals the arena of the rewritten program, for any early fetches and kept stages."""
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
    foreseen = arena_bytes(order, specs, stages, early)
    fetch_weights(program, {s: {order[i].kind: n for i, n in early.items() if order[i].stage == s} for s in stages})
    assert plan_arena(program)[1] == foreseen


def test_memory_is_used_up_to_the_budget() -> None:
    """One parameter more than planned, fetched early, would not fit."""
    draft = ready(swapping("21kB", num_devices=1))
    program, budget = draft.programs[0], 21_000
    stages = [phase.stage for phase in phases(program)]
    early = look_ahead(program, stages, budget)
    assert profile_swapped(program, early).peak_bytes[ops.DEVICE] <= budget
    order = phases(program)
    able = {(order[i].stage, order[i].kind) for i in fetched_phases(order, stages) if i > 0}
    counts = {(stage, kind): early[stage].get(kind, 0) for stage, kind in able}
    left = [key for key, count in counts.items() if count < len(program.interface.stages[key[0]].params)]
    assert left
    for stage, kind in left:
        more = {**early, stage: {**early[stage], kind: counts[stage, kind] + 1}}
        assert profile_swapped(program, more).peak_bytes[ops.DEVICE] > budget
    assert look_ahead(program, stages, budget, reserved_bytes=6_000) == {name: {} for name in early}


def test_fetched_weights_are_not_on_the_device_between() -> None:
    draft = ready(swapping("21kB"))
    before = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
    apply(draft, *all_passes()[5:])
    after = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
    assert all(a < b for a, b in zip(after, before))
    weights = sum(s.spec.weight_bytes for s in draft.stages_on(0))
    assert profile_memory(draft.programs[0]).persistent.dram["weights"] == weights
