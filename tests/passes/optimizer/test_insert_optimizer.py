"""`insert-optimizer`: every gradient reaches one update, as early as it may, summed over ties and clipped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import place_frees, profile_memory, work_of
from penstock.passes.draft import Draft
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.optimizer.timing import UNCLIPPED, tie_groups
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import all_passes, apply, chain, draft_of, text_of, trace_case

TAKEN = {ops.DEVICE: 1 << 30, ops.DRAM: 1 << 31}  # bytes, more than all else


def ready(hardware: Hardware | None = None, swapped: bool = True, **options: object) -> Draft:
    draft = draft_of(chain(depth=3), hardware, **{"micro_batches": 2, **options})
    decisions = {} if not swapped else {
        "rematerialise": ["stage0", "stage1"], "fetch": {f"stage{i}": {} for i in range(4)},
    }  # fmt: skip
    return apply(draft, *all_passes(4)[:6], decisions=decisions)


@pytest.mark.parametrize("swapped", [False, True])
def test_text(swapped: bool, golden: Golden) -> None:
    draft = apply(ready(swapped=swapped), InsertOptimizer())
    golden(text_of(draft), "swapped" if swapped else "resident")


def test_text_of_ties_and_clipping(golden: Golden) -> None:
    draft = draft_of(trace_case("gpt2")[0], micro_batches=2, max_grad_norm=1.0)
    apply(draft, *all_passes(), decisions={"fetch": {"stage0": {}}})
    golden(text_of(draft), "tied-and-clipped")


def order_of(draft: Draft, device: int) -> list[str]:
    interesting = {ops.backward, ops.offload, ops.step, ops.all_reduce, ops.norm, ops.clip}
    nodes = [n for n in draft.programs[device].ops() if n.target in interesting]
    return [f"{n.target.name} {n.args[0]}" if n.target in (ops.backward, ops.step) else n.target.name for n in nodes]  # type: ignore[union-attr]


def test_a_swapped_stage_is_stepped_behind_the_offload_of_the_next() -> None:
    """Which so need not wait until the step has used the gradients before."""
    draft = apply(ready(), InsertOptimizer())
    last, first = ["backward stage2"] * 2, ["backward stage0"] * 2
    assert order_of(draft, 0) == [*last, "offload", *first, "offload", "step stage2", "step stage0"]


def test_gradients_of_one_stage_at_a_time_where_dram_has_no_room_for_two() -> None:
    roomy = apply(ready(), InsertOptimizer())
    need = sum(profile_memory(p).peak_bytes[ops.DRAM] for p in roomy.programs)
    draft = apply(ready(Hardware.cpu(num_devices=2, dram=need - 1).with_(dram_usable_fraction=1.0)), InsertOptimizer())
    assert [name.split()[0] for name in order_of(draft, 0)] == 2 * ["backward", "backward", "offload", "step"]
    assert sum(profile_memory(p).peak_bytes[ops.DRAM] for p in draft.programs) < need


def swapped_chain(hardware: Hardware) -> Draft:
    draft = draft_of(chain(7, 128, 32), hardware, micro_batches=2)
    names = [f"stage{i}" for i in range(8)]
    decisions = {"rematerialise": names, "fetch": {name: {} for name in names}}
    return apply(draft, *all_passes(8)[:6], decisions=decisions)


def test_updates_overlap_with_the_backward_of_earlier_stages() -> None:
    """Behind the last backward comes little more than one stage's offload and update."""
    draft = apply(swapped_chain(Hardware.cpu(num_devices=1, d2h="2GB/s")), InsertOptimizer())
    timeline = simulate(draft.programs, draft.lane_hardware)
    updates = [s for s in timeline.spans if s.op in ("offload", "step")]
    serial_s = sum(s.end_s - s.start_s for s in updates)
    tail_s = timeline.step_s - max(s.end_s for s in timeline.spans if s.op == "backward")
    assert len(updates) == 2 * 8
    assert tail_s < 1.5 * serial_s / 8


def test_gradients_leave_the_device_behind_their_last_backward() -> None:
    """Less memory than when all leave at the end of the step."""
    draft, late = (swapped_chain(Hardware.cpu(num_devices=1)) for _ in range(2))
    apply(draft, InsertOptimizer())
    program = late.programs[0]
    grads = program.results()["grads"]
    program.returns({"loss": program.results()["loss"]})
    with program.graph.inserting_before(program.graph.output_node()):
        for value in reversed(grads):
            (gone,) = program.emit(ops.offload, value)
            program.emit(ops.step, value.meta["type"].stage, gone)
    place_frees(program)
    early, after = (profile_memory(d.programs[0]).peak_bytes[ops.DEVICE] for d in (draft, late))
    assert early < after - 5 * draft.stages[0].spec.grad_bytes


def test_resident_stages_are_stepped_where_they_are() -> None:
    draft = apply(ready(swapped=False), InsertOptimizer())
    for program in draft.programs:
        assert not any(n.target in (ops.offload, ops.fetch) for n in program.ops())
    assert [n for n in order_of(draft, 0) if n.startswith("step")] == ["step stage0", "step stage2"]


def test_clipping_waits_for_the_norm_of_the_whole_model() -> None:
    draft = apply(ready(max_grad_norm=0.5), InsertOptimizer())
    interface = draft.programs[0].interface
    assert interface.groups == {"world": ((0, "", ""), (1, "", ""))}
    for device in (0, 1):
        assert order_of(draft, device)[-6:-4] == ["norm", "all_reduce"]
        assert [name.split()[0] for name in order_of(draft, device)[-4:]] == ["clip", "step", "clip", "step"]


def test_fp16_unscales_and_may_skip() -> None:
    """Clipped by a norm out of reach, so that only the loss scale is taken out; the step sees the norm, to skip."""
    draft = ready(precision="fp16")
    apply(draft, InsertOptimizer())
    nodes = [n for p in draft.programs for n in p.ops()]
    assert {n.kwargs["max_norm"] for n in nodes if n.target is ops.clip} == {UNCLIPPED}
    assert all(len(n.args) == 3 for n in nodes if n.target is ops.step)


def test_ties_are_summed_in_every_stage_that_has_them() -> None:
    draft = apply(draft_of(trace_case("t5")[0], Hardware.cpu(num_devices=2)), *all_passes(5))
    groups = tie_groups(draft)
    assert list(groups) == ["tie.shared.weight"]
    rows = groups["tie.shared.weight"]
    assert len(rows) > 2 and {device for device, _, _ in rows} == {0, 1}
    for program in draft.programs:
        reduced = [n for n in program.ops() if n.target is ops.all_reduce]
        assert len(reduced) == 1 and len(reduced[0].args) == sum(device == program.device for device, _, _ in rows)


def test_owners_are_the_first_stages() -> None:
    draft = apply(draft_of(trace_case("gpt2")[0]), *all_passes(4))
    tied = ("transformer.wte.weight", "lm_head.weight")
    owners = [(s.spec.name, p.owner) for s in draft.stages for p in s.spec.params if p.name in tied]
    assert owners == [("stage0", True), ("stage3", False)]


@pytest.mark.parametrize("swapped", [False, True])
def test_what_a_step_takes_counts_where_it_is_made(swapped: bool) -> None:
    asked = set[str]()

    def step_bytes_of(rows: Sequence[tuple[str, tuple[int, ...], str]], memory: str) -> int:
        asked.update(name for name, _, _ in rows)
        return TAKEN[memory]

    memory, other = (ops.DRAM, ops.DEVICE) if swapped else (ops.DEVICE, ops.DRAM)
    without = apply(ready(swapped=swapped), InsertOptimizer())
    draft = apply(ready(swapped=swapped, step_bytes_of=step_bytes_of), InsertOptimizer())
    for program, less in zip(draft.programs, without.programs):
        last = {node: work_of(program, node) for node in program.ops() if node.target is ops.step}
        assert last and all(w.workspace_bytes == TAKEN[memory] and w.workspace_memory == memory for w in last.values())
        most, before = (profile_memory(p).peak_bytes for p in (program, less))
        assert before[memory] < TAKEN[memory] <= most[memory] <= before[memory] + TAKEN[memory]
        assert most[other] == before[other]
    assert asked == {p.name for stage in draft.stages for p in stage.spec.params}
